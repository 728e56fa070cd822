"""The example's helpers do what its report relies on."""

import base64
import json
import math
import sys
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # as Python does for a program that lies there

from text_demo.model import ByteGPT, ModelShape, split_parameters  # noqa: E402
from text_demo.report import render_page, write_report  # noqa: E402
from text_demo.results import COLUMNS, RunResult, conclusions, table_rows  # noqa: E402
from text_demo.settings import Run, Settings, parse_settings  # noqa: E402
from text_demo.text import IGNORED_TARGET, Corpus, load_text, unigram_entropy  # noqa: E402

# --- text


def test_default_text_is_real_and_the_same_each_time() -> None:
    text = load_text()
    assert len(text) > 300_000
    assert b"The try statement" in text or b"exception" in text
    assert text == load_text()


def test_text_of_a_file_is_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_bytes(bytes(range(256)))
    assert load_text(path) == bytes(range(256))


@pytest.mark.parametrize("text", [load_text()[-5000:], b"aaaa", bytes(range(256)) * 2, b"aab"])
def test_unigram_entropy_equals_a_count_by_hand(text: bytes) -> None:
    expected = 0.0
    for count in Counter(text).values():
        expected -= count / len(text) * math.log2(count / len(text))
    assert unigram_entropy(torch.tensor(list(text), dtype=torch.uint8)) == pytest.approx(expected, abs=1e-12)


def test_corpus_holds_out_the_last_tenth() -> None:
    text = load_text()[:5000]
    corpus = Corpus.from_bytes(text, context=16)
    assert bytes(corpus.training.tolist()) == text[:4500]
    assert bytes(corpus.validation.tolist()) == text[4500:]


def test_corpus_refuses_a_text_that_is_too_short() -> None:
    with pytest.raises(ValueError, match="has 100 bytes"):
        Corpus.from_bytes(bytes(100), context=16)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_predicts_every_byte_once_on_any_number_of_ranks(world_size: int) -> None:
    corpus = Corpus.from_bytes(load_text()[:7000], context=16)
    pairs = []
    num_batches = set()
    for rank in range(world_size):
        batches = list(corpus.validation_batches(6, rank=rank, world_size=world_size))
        num_batches.add(len(batches))
        for inputs, targets in batches:
            assert inputs.shape == targets.shape == (6 // world_size, 16)
            wanted = targets != IGNORED_TARGET
            pairs += zip(inputs[wanted].tolist(), targets[wanted].tolist(), strict=True)
    text = corpus.validation.tolist()
    assert len(num_batches) == 1
    assert sorted(pairs) == sorted(pairwise(text))
    assert corpus.num_validation_targets == len(pairs)


def test_ranks_together_see_the_batches_of_one_rank() -> None:
    corpus = Corpus.from_bytes(load_text()[:7000], context=16)
    whole = corpus.training_batches(8, rank=0, world_size=1, seed=3)
    parts = [corpus.training_batches(8, rank=rank, world_size=4, seed=3) for rank in range(4)]
    first = None
    for _ in range(3):
        inputs, targets = next(whole)
        of_ranks = [next(part) for part in parts]
        assert torch.equal(inputs, torch.cat([inputs for inputs, _ in of_ranks]))
        assert torch.equal(targets, torch.cat([targets for _, targets in of_ranks]))
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert first is None or not torch.equal(first, inputs)
        first = inputs


# --- model


@pytest.fixture(scope="module")
def model() -> ByteGPT:
    torch.manual_seed(0)
    return ByteGPT(ModelShape())


def test_model_has_the_size_that_is_told(model: ByteGPT) -> None:
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(0.7e6, rel=0.1)


def test_untrained_model_guesses_evenly(model: ByteGPT) -> None:
    logits = model(torch.randint(256, (2, 20)))
    assert logits.shape == (2, 20, 256)
    assert torch.all(logits == 0)


def test_model_does_not_look_ahead(model: ByteGPT) -> None:
    inputs = torch.randint(256, (1, 20))
    changed = inputs.clone()
    changed[0, 12] = (inputs[0, 12] + 1) % 256
    head = torch.randn(256, model.head.in_features)  # the model's own is still zero
    with torch.no_grad():
        outputs, others = (
            torch.func.functional_call(model, {"head.weight": head}, (values,)) for values in (inputs, changed)
        )
    torch.testing.assert_close(outputs[:, :12], others[:, :12])
    assert not torch.allclose(outputs[:, 12:], others[:, 12:])


def test_every_parameter_is_in_exactly_one_group(model: ByteGPT) -> None:
    split = split_parameters(model)
    grouped = Counter(id(parameter) for parameter in [*split.matrices, *split.others])
    assert grouped == Counter(id(parameter) for parameter in model.parameters())
    assert len(split.matrices) == 6 * len(model.blocks)
    assert all(parameter.ndim == 2 for parameter in split.matrices)
    assert {id(model.embedding.weight), id(model.head.weight)} <= {id(other) for other in split.others}


# --- settings


def test_settings_list_a_run_for_each_transport_and_the_yardstick() -> None:
    settings = parse_settings(["--transports", "local,full", "--steps", "7", "--world-size", "1"])
    assert [(run.name, run.transport, run.exact) for run in settings.runs()] == [
        ("local", "local", False),
        ("full", "full", True),
        ("AdamW", None, False),
    ]
    assert settings.steps == 7


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--transports", "full,pigeon"], "not installed: pigeon"),
        (["--text", "no/such/file"], "no/such/file"),
        (["--steps", "0"], "at least 1"),
    ],
)
def test_senseless_arguments_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_settings(arguments)
    assert raised.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("steps", [1, 3, 4, 5, 10, 120, 121])
def test_validation_is_read_a_few_times_and_at_the_end(steps: int) -> None:
    settings = Settings(steps=steps)
    evaluated = [step for step in range(1, steps + 1) if settings.evaluates_after(step)]
    assert evaluated[-1] == steps
    assert len(evaluated) == min(steps, settings.num_evaluations)


@pytest.mark.parametrize("world_size", [1, 3, 4, 5, 48])
def test_every_rank_gets_equally_many_sequences(world_size: int) -> None:
    settings = Settings(world_size=world_size)
    assert settings.batch_size % world_size == 0
    assert settings.batch_size >= max(world_size, settings.min_batch_size)


# --- results and report


def result(
    name: str, *, last: float = 1.5, exact: bool = True, transport: str | None = "full", deferred: float = 0.0
) -> RunResult:
    """A run of three steps."""
    return RunResult(
        run=Run(name, transport, exact),
        training_loss=(5.5, 3.0, last),
        validation_loss=((1, 4.0), (3, last)),
        bytes_per_step=1_310_720.0,
        rows_applied=1024.0,
        rows_deferred=deferred,
        step_ms=200.4,
        optimizer_ms=50.6,
    )


def test_coinciding_curves_are_told_with_their_difference() -> None:
    sentences = conclusions([result("full"), result("varlen", last=1.5 + 1e-5), result("local", exact=False)], 4.5)
    assert "coincide (full, varlen): largest difference 1e-05 nats" in sentences[0]
    assert "local" not in sentences[0]
    assert sentences[1].startswith("Every run fell below")


def test_curves_apart_and_losses_too_high_are_told_as_such() -> None:
    sentences = conclusions([result("full"), result("varlen", last=3.4)], 4.5)
    assert sentences[0].startswith("Exact transports' curves DO NOT coincide")
    assert sentences[1].startswith("NOT below")
    assert "varlen 4.905" in sentences[1]
    assert "full" not in sentences[1]


def test_a_run_that_deferred_is_not_compared() -> None:
    first, _ = conclusions([result("full"), result("capped", last=1.7, deferred=2.0)], 4.5)
    assert first == (
        "Exact transports: full, so there are no two curves to compare (capped deferred rows and is left out)."
    )


def test_a_loss_that_is_no_number_counts_as_not_fallen() -> None:
    assert conclusions([result("full", last=math.nan)], 4.5)[1].startswith("NOT below")


def test_table_has_a_cell_for_every_column() -> None:
    rows = table_rows([result("full"), result("AdamW", transport=None)])
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert rows[0] == ("full", "1.5000", "2.164", "1,310,720", "1,024", "0.0", "200", "51")
    assert rows[1][3:6] == ("-", "-", "-")


class References(HTMLParser):
    """Collects what a page would load, and the names of its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.elements: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.loaded += [value or "" for name, value in attrs if name in ("src", "srcset", "href", "data", "poster")]


@pytest.fixture(scope="module")
def page() -> str:
    settings = Settings(text=Path("somewhere/<b>&.txt"), steps=3)
    return render_page(settings, [result("full"), result("AdamW", transport=None)], 4.5)


def test_page_holds_its_pictures_and_loads_nothing(page: str) -> None:
    references = References()
    references.feed(page)
    assert references.elements["img"] == 2
    assert len(references.loaded) == 2
    for address in references.loaded:
        kind, data = address.split(",", 1)
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data, validate=True).startswith(b"\x89PNG\r\n\x1a\n")
    assert not {"script", "link", "iframe", "object"} & set(references.elements)
    assert "url(" not in page
    assert "://" not in page
    assert "@import" not in page


def test_page_shows_the_table_and_escapes_names(page: str) -> None:
    assert "<td>1,310,720</td>" in page
    assert "4.500 bits per byte" in page
    assert "<b>" not in page
    assert "&lt;b&gt;&amp;.txt" in page
    assert "somewhere" not in page


def test_numbers_are_written_as_json(tmp_path: Path) -> None:
    settings = Settings(steps=3, out=tmp_path / "new" / "folder")
    written = write_report(settings, [result("full", last=math.inf)], 4.5)
    assert written == tmp_path / "new" / "folder" / "report.html"
    numbers = json.loads(written.with_suffix(".json").read_text())
    assert numbers["unigram_bits_per_byte"] == 4.5
    [run] = numbers["runs"]
    assert run["training_curve"] == [5.5, 3.0, None]
    assert run["bytes_per_step"] == 1_310_720
