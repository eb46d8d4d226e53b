"""Arrow schemas of every table in a catalog: the data model of DESIGN.md, column by column.

Keys are 32 hex characters. Times are pts in the stream's time base (``tb_num / tb_den`` seconds each) or microseconds
(floor). Integers that people filter by are signed. Artifact tables are append-only; each of their rows begins with
``item_key`` (what the result is for) and ``input_digest`` (what it was made from).
"""

from __future__ import annotations

from typing import Literal

import lance
import pyarrow as pa

FORMAT_NUMBER = 1
DATA_STORAGE_VERSION: Literal["2.2"] = "2.2"

KEY = pa.string()
INTERVAL = pa.struct([("t0_pts", pa.int64()), ("t1_pts", pa.int64())])
#: Damage: intervals of pts, half-open.
DAMAGE = pa.list_(INTERVAL)
#: Where some bytes of an artifact table lie: part number (position in the version manifest's list of that table's
#: parts), Lance stable row id, byte range inside the row's blob.
BLOB_REF = pa.struct([("part", pa.int32()), ("row_id", pa.int64()), ("offset", pa.int64()), ("length", pa.int64())])
#: A run of samples in an audio table: as BLOB_REF, and which samples they are.
SOUND_REF = pa.struct([*BLOB_REF, ("first", pa.int64()), ("count", pa.int32())])
ROW_REF = pa.struct([("part", pa.int32()), ("row_id", pa.int64())])
#: A row that holds an array (`ARRAY`), and the array's shape, so that a loader knows how large a batch will be.
ARRAY_REF = pa.struct([("part", pa.int32()), ("row_id", pa.int64()), ("shape", pa.list_(pa.int32()))])
AUDIO_STREAM = pa.struct(
    [("stream", pa.int32()), ("codec", pa.string()), ("channels", pa.int32()), ("sample_rate", pa.int32())]
)

ARTIFACT_HEAD: list[pa.Field] = [
    pa.field("item_key", KEY, nullable=False),
    pa.field("input_digest", KEY, nullable=False),
    pa.field("video_key", KEY, nullable=False),
    pa.field("stream", pa.int32(), nullable=False),
]

SOURCES = pa.schema(
    [
        pa.field("uri", pa.string(), nullable=False),  # without credentials or query
        pa.field("size", pa.int64()),
        pa.field("stamp", pa.string()),  # etag, else modification time
        pa.field("video_key", KEY),
        pa.field("metadata", pa.string()),  # the user's columns as JSON
        pa.field("job", pa.string()),
        pa.field("at", pa.timestamp("us", "UTC")),
    ]
)

LEDGER = pa.schema(
    [
        pa.field("stage", pa.string(), nullable=False),
        pa.field("fingerprint", KEY, nullable=False),
        pa.field("item_key", KEY, nullable=False),
        pa.field("video_key", KEY, nullable=False),
        pa.field("input_digest", KEY),
        pa.field("output_digest", KEY),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("state", pa.string(), nullable=False),  # done | filtered | quarantined | retry
        pa.field("class", pa.string()),  # quarantine class, or the reason of a filter
        pa.field("message", pa.string()),
        pa.field("damage", DAMAGE),
        pa.field("unit", KEY),
        pa.field("job", pa.string()),
        pa.field("attempt", pa.int32()),
        pa.field("at", pa.timestamp("us", "UTC"), nullable=False),
    ]
)

VIDEOS = pa.schema(
    ARTIFACT_HEAD
    + [
        pa.field("container", pa.string()),
        pa.field("codec", pa.string()),
        pa.field("profile", pa.string()),
        pa.field("pix_fmt", pa.string()),
        pa.field("width", pa.int32()),  # as stored
        pa.field("height", pa.int32()),
        pa.field("sar_num", pa.int32()),
        pa.field("sar_den", pa.int32()),
        pa.field("rotation", pa.int32()),  # degrees clockwise that make the picture upright
        pa.field("mirrored", pa.bool_()),
        pa.field("upright_width", pa.int32()),  # as shown: square pixels, upright
        pa.field("upright_height", pa.int32()),
        pa.field("color_range", pa.string()),
        pa.field("color_space", pa.string()),
        pa.field("color_transfer", pa.string()),
        pa.field("color_primaries", pa.string()),
        pa.field("hdr", pa.bool_()),
        pa.field("interlaced", pa.bool_()),
        pa.field("tb_num", pa.int64()),
        pa.field("tb_den", pa.int64()),
        pa.field("start_pts", pa.int64()),
        pa.field("last_pts", pa.int64()),
        pa.field("end_pts", pa.int64()),
        pa.field("duration_us", pa.int64()),
        pa.field("fps", pa.float64()),
        pa.field("vfr", pa.bool_()),
        pa.field("num_frames", pa.int64()),  # decoded shown frames
        pa.field("num_clean_frames", pa.int64()),
        pa.field("num_packets", pa.int64()),
        pa.field("header_frames", pa.int64()),  # as the container claims; 0 if it does not
        pa.field("dropped_frames", pa.int64()),  # decoded, but with a pts that is missing or not increasing
        pa.field("size_changes", pa.int32()),
        pa.field("damage", DAMAGE),
        pa.field("audio_streams", pa.list_(AUDIO_STREAM)),
        pa.field("pts", pa.list_(pa.int64())),  # of every shown frame
    ]
)

FRAMES = pa.schema(
    ARTIFACT_HEAD
    + [
        pa.field("chunk", pa.int32(), nullable=False),
        pa.field("n", pa.int32(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("pts", pa.list_(pa.int64()), nullable=False),
        pa.field("offsets", pa.list_(pa.int32()), nullable=False),  # n + 1, see store/blobs.py
        pa.field("damage", DAMAGE),
        pa.field("digest", KEY, nullable=False),  # BLAKE3 of data
        lance.blob_field("data"),
    ]
)

SHOTS = pa.schema(
    ARTIFACT_HEAD
    + [
        pa.field("detector", pa.string()),
        # One number per shown frame (the pts are in the videos row), thousandths: how much it looks like the first
        # frame of a new shot. Integers, so that digests of them hold.
        pa.field("scores", pa.list_(pa.int32())),
        pa.field("cuts", pa.list_(pa.int32())),  # at the detector's own default threshold: first frames of new shots
    ]
)

QUALITY = pa.schema(
    ARTIFACT_HEAD
    + [
        pa.field("pts", pa.list_(pa.int64())),
        pa.field("motion", pa.list_(pa.float32())),
        pa.field("sharpness", pa.list_(pa.float32())),
        pa.field("luma", pa.list_(pa.float32())),
        pa.field("black", pa.list_(pa.float32())),
    ]
)

AUDIO = pa.schema(
    ARTIFACT_HEAD
    + [
        pa.field("audio_stream", pa.int32(), nullable=False),  # container index
        pa.field("chunk", pa.int32(), nullable=False),
        pa.field("rate", pa.int32(), nullable=False),
        pa.field("channels", pa.int32(), nullable=False),
        pa.field("codec", pa.string(), nullable=False),
        pa.field("first_sample", pa.int64(), nullable=False),  # sample k is at the video's start + k / rate seconds
        pa.field("n", pa.int64(), nullable=False),  # samples that were heard
        # Runs of samples without a gap, each a record of the blob (see store/blobs.py; its number is the run's first
        # sample, its payload a FLAC stream or an Ogg Opus file of exactly as many samples). Most chunks have one.
        pa.field("first_samples", pa.list_(pa.int64()), nullable=False),
        pa.field("counts", pa.list_(pa.int32()), nullable=False),
        pa.field("offsets", pa.list_(pa.int32()), nullable=False),  # one more than runs
        pa.field("failed_packets", pa.int32(), nullable=False),  # that did not decode, since the chunk before
        pa.field("overlap_samples", pa.int64(), nullable=False),  # of the source, left out as they were told twice
        pa.field("digest", KEY, nullable=False),  # BLAKE3 of data
        lance.blob_field("data"),
    ]
)

SOUND = pa.schema(
    ARTIFACT_HEAD
    + [
        pa.field("rate", pa.int32()),  # of the cached sound that was measured
        pa.field("channels", pa.int32()),
        # Step j is [j, j + 1) / 10 s after the video's first shown pts.
        pa.field("loudness", pa.list_(pa.float32())),  # LUFS of the 400 ms that end with the step
        pa.field("peak", pa.list_(pa.int32())),  # of 32768
        pa.field("heard", pa.list_(pa.int32())),  # samples of the step that are sound, the others are holes
        pa.field("speech", pa.list_(pa.float32())),  # windows of 32 ms, 0…1; null where no detector looked
    ]
)

LOGMEL = pa.schema(
    ARTIFACT_HEAD
    + [
        pa.field("rate", pa.int32()),  # of the cached sound
        pa.field("hop", pa.int32()),  # samples from one spectrum to the next
        pa.field("bins", pa.int32()),
        pa.field("first_step", pa.int64()),  # spectrum j is of what lies around sample j · hop
        pa.field("n", pa.int32()),
        pa.field("digest", KEY, nullable=False),  # BLAKE3 of data
        lance.blob_field("data"),  # float16 (n, bins), little endian
    ]
)

POSITION_OF_CLIP: list[pa.Field] = [
    pa.field("clip_key", KEY, nullable=False),
    pa.field("t0_pts", pa.int64()),
    pa.field("t1_pts", pa.int64()),
    pa.field("tb_num", pa.int64()),
    pa.field("tb_den", pa.int64()),
    pa.field("start_pts", pa.int64()),
    pa.field("t0_us", pa.int64()),
    pa.field("t1_us", pa.int64()),
    pa.field("first_frame", pa.int64()),
    pa.field("last_frame", pa.int64()),  # inclusive
    pa.field("num_frames", pa.int64()),
]

POOLED_SCORES: list[pa.Field] = [
    pa.field("motion", pa.float32()),
    pa.field("sharpness", pa.float32()),
    pa.field("luma", pa.float32()),
    pa.field("black", pa.float32()),
]

CLIPS = pa.schema(
    ARTIFACT_HEAD
    + POSITION_OF_CLIP
    + [
        pa.field("shot", pa.int32()),  # number of the shot (or window) it was cut from
        pa.field("segment", pa.int32()),  # number of the manifest's interval it is, else -1
        pa.field("state", pa.string()),  # done | filtered
        pa.field("reason", pa.string()),
    ]
    + POOLED_SCORES
)


def embeddings(dim: int, dtype: pa.DataType) -> pa.Schema:
    """Rows of embeddings/<fp>: one L2-normalised vector a clip."""
    return pa.schema(
        ARTIFACT_HEAD
        + [
            pa.field("clip_key", KEY, nullable=False),
            pa.field("num_frames", pa.int32()),  # frames that were pooled
            pa.field("vector", pa.list_(dtype, dim)),
        ]
    )


#: An array in a row: ``data`` is its bytes, little-endian, in C order, ``crc`` their CRC-32; ``dtype`` as numpy spells
#: it, or ``bfloat16``.
ARRAY: list[pa.Field] = [
    pa.field("shape", pa.list_(pa.int32()), nullable=False),
    pa.field("dtype", pa.string(), nullable=False),
    pa.field("data", pa.large_binary(), nullable=False),
    pa.field("crc", pa.int64(), nullable=False),
]

#: tokens/<fp>: one row a clip. The array's last three axes are the grid (t, h, w), those before it channels.
TOKENS = pa.schema(
    ARTIFACT_HEAD
    + [
        pa.field("clip_key", KEY, nullable=False),
        pa.field("kind", pa.string(), nullable=False),  # ids | latents
        pa.field("tokenizer", pa.string(), nullable=False),
        pa.field("tokenizer_digest", KEY, nullable=False),  # of its weights or codebook
        pa.field("num_frames", pa.int32(), nullable=False),  # frames the array stands for, from the clip's start on
        pa.field("height", pa.int32(), nullable=False),  # of the pictures that were tokenized
        pa.field("width", pa.int32(), nullable=False),
        pa.field("first_us", pa.int64()),  # stream time of the first of these frames and of the last
        pa.field("last_us", pa.int64()),
        pa.field("grid", pa.list_(pa.int32()), nullable=False),  # t, h, w
        *ARRAY,
        pa.field("psnr", pa.float32()),  # of the reconstruction, null where there is no decoder
        pa.field("ssim", pa.float32()),
    ]
)

#: text/<fp>: one row a video with a caption. The array is (L,) token ids or (L, D) outputs of the encoder.
TEXT = pa.schema(
    ARTIFACT_HEAD
    + [
        pa.field("text_digest", KEY, nullable=False),  # the text itself stays with the sources
        pa.field("encoder", pa.string(), nullable=False),
        pa.field("encoder_digest", KEY, nullable=False),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("segments", pa.list_(pa.int32())),  # the manifest's intervals that say it, null: the whole video
        *ARRAY,
    ]
)

#: One chosen clip a row. ``data``: records as in `FRAMES`, each a JPEG or one H.264 access unit (Annex B, parameter
#: sets before every keyframe, no reordering: packet i is frame i). Every ``gop`` frames a keyframe begins.
PAYLOAD = pa.schema(
    ARTIFACT_HEAD
    + [
        pa.field("clip_key", KEY, nullable=False),
        pa.field("n", pa.int32(), nullable=False),  # frames
        pa.field("width", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("fps_num", pa.int64(), nullable=False),  # the grid's rate; 0/1: every shown frame of the clip
        pa.field("fps_den", pa.int64(), nullable=False),
        pa.field("first_grid", pa.int64(), nullable=False),  # the clip's own grid times: first_grid, first_grid + 1, …
        pa.field("grid_count", pa.int64(), nullable=False),
        pa.field("codec", pa.string(), nullable=False),  # h264 | jpeg
        pa.field("gop", pa.int32(), nullable=False),
        pa.field("pts", pa.list_(pa.int64()), nullable=False),  # of every frame, in the source
        pa.field("offsets", pa.list_(pa.int64()), nullable=False),  # n + 1, see store/blobs.py
        pa.field("digest", KEY, nullable=False),  # BLAKE3 of data
        lance.blob_field("data"),
    ]
)

#: What a version says of a clip's payload: where it lies, and what the loader must know to take frames of it.
#: ``gop_offsets``: where each group of ``gop`` frames begins in the blob, and where the last one ends.
PAYLOAD_REF = pa.struct(
    [
        *BLOB_REF,
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("fps_num", pa.int64()),
        ("fps_den", pa.int64()),
        ("first_grid", pa.int64()),
        ("grid_count", pa.int64()),
        ("n", pa.int32()),
        ("codec", pa.string()),
        ("gop", pa.int32()),
        ("gop_offsets", pa.list_(pa.int64())),
        ("digest", pa.string()),
    ]
)

#: versions/<name>/<n>/clips.lance without the columns of scores and metadata, which follow `POOLED_SCORES`.
VERSION_HEAD: list[pa.Field] = [
    pa.field("position", pa.int64(), nullable=False),
    *POSITION_OF_CLIP,
    pa.field("video_key", KEY, nullable=False),
    pa.field("stream", pa.int32()),
    pa.field("uri", pa.string()),
    pa.field("shot", pa.int32()),
    pa.field("segment", pa.int32()),
    pa.field("split", pa.string()),
    pa.field("weight", pa.float32()),
    pa.field("bucket", pa.int32()),
    # What the loader needs of the frame cache: pictures are width × height, on a grid of cache_fps; the clip's own
    # grid times are first_grid, first_grid + 1, … (grid_count of them), all ≥ t0 and < t1.
    pa.field("width", pa.int32()),
    pa.field("height", pa.int32()),
    pa.field("cache_fps_num", pa.int64()),
    pa.field("cache_fps_den", pa.int64()),
    pa.field("first_grid", pa.int64()),
    pa.field("grid_count", pa.int64()),
    pa.field("frames", pa.list_(BLOB_REF)),
    pa.field("embedding", ROW_REF),
]
#: In versions of recipes with a payload stage; null where a clip was not chosen.
VERSION_PAYLOAD = pa.field("payload", PAYLOAD_REF)
#: What versions of recipes with the stage audio have besides, see dataset/sound.py.
VERSION_AUDIO: list[pa.Field] = [
    pa.field("audio", pa.list_(SOUND_REF)),
    pa.field("audio_rate", pa.int32()),
    pa.field("audio_channels", pa.int32()),
]
#: Columns that lead to arrays; they follow where a recipe makes them.
ARRAY_COLUMNS = ("tokens", "latents", "text_embedding", "text_ids")
VERSION_RESERVED = frozenset(
    [*(f.name for f in [*VERSION_HEAD, *POOLED_SCORES, VERSION_PAYLOAD, *VERSION_AUDIO]), *ARRAY_COLUMNS]
)
