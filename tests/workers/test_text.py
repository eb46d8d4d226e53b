"""Captions through real encoders: small models that the test makes and saves, and their own forward pass beside it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from videoflow.errors import MediaError, MissingWeights, RecipeError, SourceError
from videoflow.fingerprint import fingerprint
from videoflow.stage import Item
from workers.text import Text, TextParams

torch = pytest.importorskip("torch", reason="needs videoflow[transformers]")
transformers = pytest.importorskip("transformers", reason="needs videoflow[transformers]")
tokenizers = pytest.importorskip("tokenizers", reason="needs videoflow[transformers]")

WORDS = "[PAD] [UNK] [CLS] [SEP] a red bicycle lies on its side in the grass two ducks swim".split()
CAPTIONS = ["a red bicycle", "two ducks swim in the grass", "a", "a red bicycle lies on its side in the grass"]


def tokenizer_file() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


def _bert() -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.BertModel(transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=64, **sizes))


def _t5() -> Any:
    """With a decoder, which is to be left out."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return transformers.T5Model(transformers.T5Config(vocab_size=len(WORDS), **sizes))


def save(folder: Path, make: Any, *, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    make().eval().save_pretrained(folder)
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer_file(), **names).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["bert", "t5"])
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), {"bert": _bert, "t5": _t5}[request.param])


def item(caption: object, column: str = "caption") -> Item:
    return Item("v" * 32, {}, metadata={} if caption is None else {column: caption})


def row_of(stage: Text, caption: object) -> Any:
    return stage.process(item(caption)).rows[0]


def array(row: Any) -> np.ndarray:
    return np.frombuffer(row["data"], row["dtype"]).reshape(row["shape"])


def direct(folder: Path, caption: str, layer: int = -1) -> np.ndarray:
    """The last hidden states for a caption's own tokens, by the model's class."""
    cls = transformers.T5EncoderModel if "t5" in folder.name else transformers.BertModel
    ids = torch.tensor([[2, *(WORDS.index(w) for w in caption.split()), 3]])
    with torch.no_grad():
        made = cls.from_pretrained(folder).eval()(ids, output_hidden_states=True)
    return (made.last_hidden_state if layer == -1 else made.hidden_states[layer])[0].numpy()


def test_outputs_are_the_models_own_and_as_long_as_the_text(encoder: Path) -> None:
    stage = Text(TextParams(weights=str(encoder), kept_dtype="float32"))
    for caption in CAPTIONS:
        row = row_of(stage, caption)
        assert row["shape"] == [len(caption.split()) + 2, 16]
        assert (row["num_tokens"], row["truncated"]) == (len(caption.split()) + 2, False)
        np.testing.assert_allclose(array(row), direct(encoder, caption), atol=1e-5)
    assert stage.column() == "text_embedding"


def test_another_layer_and_another_type(encoder: Path) -> None:
    row = row_of(Text(TextParams(weights=str(encoder), layer=1)), CAPTIONS[0])
    assert row["dtype"] == "float16"
    np.testing.assert_allclose(array(row), direct(encoder, CAPTIONS[0], layer=1), atol=2e-3)


def test_order_and_neighbours_change_nothing(encoder: Path) -> None:
    together = Text(TextParams(weights=str(encoder)))
    rows = {c: row_of(together, c) for c in CAPTIONS}
    assert {c: row_of(together, c) for c in reversed(CAPTIONS)} == rows
    assert {c: row_of(Text(TextParams(weights=str(encoder))), c) for c in CAPTIONS} == rows


def test_long_texts_are_cut_and_marked(encoder: Path) -> None:
    row = row_of(Text(TextParams(weights=str(encoder), max_tokens=4)), CAPTIONS[1])
    assert (row["num_tokens"], row["truncated"]) == (4, True)
    assert row_of(Text(TextParams(weights=str(encoder), max_tokens=5)), CAPTIONS[0])["truncated"] is False


def test_the_same_text_is_encoded_once(encoder: Path) -> None:
    stage = Text(TextParams(weights=str(encoder)))
    stage.setup()
    calls: list[str] = []
    encode = stage._live.encode  # type: ignore[union-attr]
    stage._live.encode = lambda text, **options: calls.append(text) or encode(text, **options)  # type: ignore
    rows = [row_of(stage, c) for c in [CAPTIONS[0], CAPTIONS[1], CAPTIONS[0], f" {CAPTIONS[0]} "]]
    assert calls == CAPTIONS[:2]
    assert rows[0] == rows[2] == rows[3]


def test_token_ids_alone(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer_file().save(str(path))
    stage = Text(TextParams(encoder="tokenizers", weights=str(path), column="title"))
    row = stage.process(item("two red ducks", column="title")).rows[0]
    assert array(row).tolist() == [2, WORDS.index("two"), WORDS.index("red"), WORDS.index("ducks"), 3]
    assert (row["dtype"], stage.column(), stage.metadata_columns()) == ("int32", "text_ids", ("title",))
    cut = Text(TextParams(encoder="tokenizers", weights=str(path), max_tokens=2)).process(item("a red a"))
    assert (array(cut.rows[0]).tolist(), cut.rows[0]["truncated"]) == ([2, 4], True)
    digests = {stage.process(item(c, column="title")).digest for c in CAPTIONS}
    assert len(digests) == len(CAPTIONS)


def test_a_video_without_a_caption_has_no_row(encoder: Path) -> None:
    stage = Text(TextParams(weights=str(encoder)))
    for none in (None, "", "  "):
        product = stage.process(item(none))
        assert (len(product.rows), product.filtered) == (0, None)
    assert row_of(stage, 3)["num_tokens"] == 3  # a number is a text too


def test_changed_weights_are_another_fingerprint_another_path_is_not(encoder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(encoder, tmp_path / "copy")
    first, same = (Text(TextParams(weights=str(p))) for p in (encoder, copy))
    assert fingerprint(first) == fingerprint(same)
    save(copy, _t5 if "t5" in encoder.name else _bert, seed=1)
    assert fingerprint(Text(TextParams(weights=str(copy)))) != fingerprint(first)
    with pytest.raises(MissingWeights, match="not those that the plan was made with"):
        same.setup()


def make_lengths(weights: str | None) -> Any:
    class Lengths:
        def encode(self, text: str, *, max_tokens: int) -> tuple[np.ndarray, bool]:
            if text == "bad":
                return np.full((2, 3), np.inf), False
            if text == "fails":
                raise RuntimeError("no such word")
            return np.array([[len(w)] for w in text.split()], np.float32), False

    return Lengths()


def make_halves(weights: str | None) -> Any:
    """Another encoder, for tests of fingerprints."""
    return make_lengths(weights)


def test_an_encoder_of_your_own() -> None:
    path = "tests.workers.test_text:make_lengths"
    stage = Text(TextParams(encoder=path, output="embedding"))
    assert array(row_of(stage, "a red bicycle")).tolist() == [[1], [3], [7]]
    for caption, said in (("bad", "not finite"), ("fails", "RuntimeError: no such word")):
        with pytest.raises(MediaError, match=said):
            stage.process(item(caption))
    with pytest.raises(MediaError, match="not ids"):
        Text(TextParams(encoder=path, output="ids")).process(item("a"))
    with pytest.raises(RecipeError, match="needs output"):
        Text(TextParams(encoder=path))


def test_captions_of_intervals_have_a_row_each() -> None:
    stage = Text(TextParams(encoder="tests.workers.test_text:make_lengths", output="embedding"))
    said = ("a", "a red", "", " a ")
    product = stage.process(Item("v" * 32, {}, interval_metadata=tuple({"caption": text} for text in said)))
    assert [(row["segments"], array(row).tolist()) for row in product.rows] == [([0, 3], [[1]]), ([1], [[1], [3]])]
    assert row_of(stage, "a")["segments"] is None
    assert product.digest != stage.process(item("a")).digest


def test_a_stage_that_makes_one_product_of_a_video_refuses_captions_of_intervals() -> None:
    class Whole(Text):
        by_interval = False

    params = TextParams(encoder="tests.workers.test_text:make_lengths", output="embedding")
    a, b = {"caption": "a", "more": 1}, {"caption": "b", "more": 2}
    for stage in (Whole(params), Text(params)):
        assert stage.told([a, {**a, "more": 3}], "/v") == stage.told([a], "/v") == [{"caption": "a"}]
    assert Text(params).told([a, b, {}], "/v") == [{"caption": "a"}, {"caption": "b"}, {}]
    with pytest.raises(SourceError, match="/v: caption differs between its intervals, and stage text makes one"):
        Whole(params).told([a, b], "/v")


def test_what_is_no_encoder(tmp_path: Path) -> None:
    with pytest.raises(MissingWeights, match="needs weights"):
        Text(TextParams()).identity()
    with pytest.raises(MissingWeights, match=r"the path of a tokenizer\.json"):
        Text(TextParams(encoder="tokenizers")).identity()
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(MissingWeights, match="no text encoder can be loaded"):
        Text(TextParams(weights=str(tmp_path))).setup()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(MissingWeights, match="is no tokenizer file"):
        Text(TextParams(encoder="tokenizers", weights=str(tmp_path / "tokenizer.json"))).setup()
    with pytest.raises(ValueError, match="allowed are transformers"):
        TextParams(encoder="word2vec")
