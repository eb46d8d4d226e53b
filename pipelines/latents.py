"""Recipe `latents`: for generators that train on tokens or latents. It runs as it is, with a codebook fitted to the
data; for a VAE of your own set ``tokenize.tokenizer=diffusers`` and ``tokenize.weights=/path/to/vae``. Captions: add
a stage ``text``.
"""

from videoflow.recipe import Recipe

recipe = Recipe(
    name="latents",
    description="Frames at 8 per second and 256 pixels, shots → clips, quality, tokens of the clips.",
    stages={
        "frames": {"fps": "8", "short_side": 256, "quality": 90, "chunk_seconds": 4},
        "shots": {"detector": "auto"},
        "quality": {"fps": "8"},
        "clips": {"by": "shots", "min_seconds": 0.5, "max_seconds": 10},
        "tokenize": {"tokenizer": "patch-vq"},
    },
)
