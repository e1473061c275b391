"""Whatever is wrong with a checkpoint is named, and another one offered."""

import os
import random
import re
import shutil
from functools import partial

import pytest

from megatrain import Engine, InputError
from megatrain.checkpoint import files, mark, rotate, verify, whole_checkpoints
from megatrain.checkpoint.manifest import KEEP, read_checkpoint
from tests.checkpoint.cases import batches, change, engine_of, flip
from tests.inside import set_steps, sized
from tests.refusals import refused, table

LAYER = "tiles/0002-layer-0.safetensors"


@pytest.fixture(scope="session")
def two(tmp_path_factory):
    """A folder with the checkpoints of two steps; to be copied."""
    folder = tmp_path_factory.mktemp("two")
    with pytest.MonkeyPatch.context() as patch:
        sized(patch, files, PIECE_BYTES=4096)
        engine = engine_of(precision="bf16")
        for step, batch in enumerate(batches(2), start=1):
            engine.step(batch)
            engine.save(folder / f"step-{step}", extra={"step": step})
    return folder


@pytest.fixture
def newer(two, tmp_path):
    """The newer one of the two, to be damaged."""
    shutil.copytree(two, tmp_path / "two")
    return tmp_path / "two" / "step-2"


def refuses(folder, *words):
    """The message that loading gives."""
    with refused(re.escape(str(folder))) as caught:
        Engine.load(folder, device="cpu")
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


def test_an_undamaged_one_is_whole(newer):
    assert whole_checkpoints(newer.parent)[0] == newer
    assert verify(newer).extra == {"step": 2}
    change(newer, lambda content: None)
    Engine.load(newer, device="cpu")


@pytest.mark.parametrize("name", ["manifest.json", LAYER, "model/config.json", "extra.json"])
def test_a_missing_or_truncated_file(newer, name):
    size = (newer / name).stat().st_size
    for share in (0.99, 0.5, 0.0):
        os.truncate(newer / name, int(share * size))
        refuses(newer, str(newer / name))
        assert whole_checkpoints(newer.parent)[0] == newer.parent / "step-1"
    (newer / name).unlink()
    refuses(newer, str(newer / name), "missing")
    assert whole_checkpoints(newer.parent)[0] == newer.parent / "step-1"


@pytest.mark.parametrize("name", [LAYER, "model/config.json", "extra.json"])
def test_a_flipped_bit(newer, name):
    size = (newer / name).stat().st_size
    for share in (0.0, 0.01, 0.3, 0.7, 0.9, 1.0):
        place = min(int(share * size), size - 1)
        flip(newer / name, place, bit=5)
        refuses(newer, str(newer / name), "checksum")
        flip(newer / name, place, bit=5)


def test_flipped_bits_of_the_manifest(newer):
    path = newer / "manifest.json"
    text, draw = path.read_bytes(), random.Random(0)
    for _ in range(200):
        flip(path, draw.randrange(len(text) - 1), draw.randrange(8))
        with pytest.raises(InputError, match="manifest.json"):
            read_checkpoint(newer)
        path.write_bytes(text)


@pytest.mark.parametrize("name", [LAYER, "extra.json", "manifest.json", "tiles"])
def test_links_are_not_followed(newer, name):
    (newer / name).rename(newer.parent / "elsewhere")
    (newer / name).symlink_to(newer.parent / "elsewhere")
    refuses(newer, str(newer / name), "links are not followed")


def lied(lie, content):
    """The last of the list is put at the place that the others name."""
    *places, name, value = lie
    for place in places:
        content = content[place]
    content[name] = value


# Names of files that leave the folder.
NAMES = ("../step-1/extra.json", "/etc/passwd", "tiles/../extra.json", "a\\b", "", "./a", "a\0b")
EDITS = {
    **{words: partial(lied, lie) for words, lie in table(__file__, "lies.yaml").items()},
    "settings.seed: Field required": lambda c: c["settings"].pop("seed"),
    "of more updates than steps": lambda c: [t.update(version=3) for t in c["tiles"]],
}


@pytest.mark.parametrize("words", EDITS)
def test_a_manifest_that_lies(newer, words):
    change(newer, EDITS[words])
    with refused(re.escape(words)):
        Engine.load(newer, device="cpu")


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_that_names_files_elsewhere(newer, name):
    change(newer, lambda c: c["files"].update({name: c["files"]["extra.json"]}))
    with refused("Predicate 'lies_inside' failed"):
        Engine.load(newer, device="cpu")


def test_the_fallback_checksum(newer, monkeypatch, tmp_path):
    """Recorded in the manifest, and read where xxhash is there, too."""
    sized(monkeypatch, files, ALGORITHM="blake2b_64")
    engine_of().save(tmp_path / "fallback")
    monkeypatch.undo()
    assert verify(tmp_path / "fallback").manifest.algorithm == "blake2b_64"
    flip(tmp_path / "fallback" / LAYER, 9000)
    with pytest.raises(InputError, match="checksum"):
        Engine.load(tmp_path / "fallback", device="cpu")


def nested(text):
    return text.rstrip().removesuffix("}") + ', "more": ' + '{"a":' * 900 + "1" + "}" * 901


# What becomes of the file called so, and what is said of it.
DAMAGES = {
    "not saved": ("model/added_tokens.json", lambda _: "{}", "not saved with the checkpoint"),
    "grown": ("model/config.json", "{}\0".format, "too long"),
    "no such checksum": (
        "manifest.json", lambda text: text.replace('"xxh3_64"', '"sha512"'), "algorithm: Predicate",
    ),
    "only nesting": ("manifest.json", lambda _: '{"a":' * 100_000, ""),
    "nested at the end": ("manifest.json", nested, ""),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_a_file_of_other_content(newer, what):
    name, edit, words = DAMAGES[what]
    path = newer / name
    path.write_text(edit(path.read_text() if path.exists() else ""))
    refuses(newer, name, words)


def test_a_huge_manifest(newer):
    os.truncate(newer / "manifest.json", 1 << 40)  # a hole: it takes no room on the disk
    refuses(newer, "manifest.json", "larger than 32 MiB")


def test_a_hostile_header_that_is_signed(newer):
    """The first piece is made to match; what it says of the planes is not believed."""
    path = newer / LAYER
    data = bytearray(path.read_bytes())
    data[:8] = (1 << 62).to_bytes(8, "little")
    path.write_bytes(data)

    def edit(content):
        size = content["files"][LAYER]["pieces"][0][0]
        summed = files.ALGORITHMS[content["algorithm"]](bytes(data[:size]))
        content["files"][LAYER]["pieces"][0] = [size, summed]

    change(newer, edit)
    refuses(newer, LAYER, "ask for a header of 4611686018427387904 bytes")


def test_an_earlier_version_s_choice_that_was_left_unset_is_passed_over(newer):
    change(newer, lambda content: content["settings"]["placement"].update(given_up=None))
    with Engine.load(newer, device="cpu") as engine:
        assert engine.placement.slots == 0


def test_a_run_and_a_misspelt_checkpoint_of_it_are_told_the_newest(newer, tmp_path):
    (tmp_path / "run").mkdir()
    shutil.move(newer.parent, tmp_path / "run" / "checkpoints")
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-9"):
        with pytest.raises(InputError, match=f"whole one there is .*/run/checkpoints/{newer.name}"):
            Engine.load(path, device="cpu")


def test_rotation_keeps_the_newest_and_the_marked(two, tmp_path):
    engine = engine_of(sizes={"num_hidden_layers": 1})
    for number in range(6):
        set_steps(engine, number)
        engine.save(tmp_path / f"{number}", keep=number == 1)
    (tmp_path / "mine").mkdir()
    os.truncate(tmp_path / "0" / LAYER, 100)
    mark(tmp_path / "2")
    assert rotate(tmp_path, 2) == [tmp_path / "3"]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["0", "1", "2", "4", "5", "mine"]  # 0 is damaged: it may be of use to somebody
    assert (tmp_path / "1" / KEEP).exists()
    assert not (tmp_path / "5" / KEEP).exists()
    with pytest.raises(ValueError, match="always stays"):
        rotate(tmp_path, 0)
