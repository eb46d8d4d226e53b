"""Recipe `clips`: a frame cache, shots cut into clips of at most ten seconds, quality scores, and embeddings."""

from videoflow.recipe import Recipe

recipe = Recipe(
    name="clips",
    description="Frames at 8 per second and 256 pixels, shots → clips, quality, EfficientNet-Lite0 embeddings.",
    stages={
        "frames": {"fps": "8", "short_side": 256, "quality": 90, "chunk_seconds": 4},
        "shots": {"detector": "auto"},
        "quality": {"fps": "8"},
        "clips": {"by": "shots", "min_seconds": 0.5, "max_seconds": 10},
        "embed": {"model": "efficientnet-lite0", "fps": "1"},
    },
)
