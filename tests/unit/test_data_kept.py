"""What is kept beside tokens: a teacher's answers, a reference's log-probabilities."""

import os
import random
import re

import numpy as np
import torch

from megatrain.data import TeacherFile, answering
from megatrain.errors import InputError, RunFailed
from megatrain.train.second_model import References

ROWS, TOP_K = 6, 3


def answers(done):
    """Micro-batches of one row from `done` on, each with as many labels as its number."""
    for row in range(done, ROWS):
        random = torch.Generator().manual_seed(row)
        labels = torch.full((1, ROWS), -100)
        labels[:, :row] = 7
        ids = torch.randint(100, (1, ROWS, TOP_K), generator=random)
        yield labels, ids, torch.randn(1, ROWS, TOP_K, generator=random)


def equal(kept, wanted):
    parts = [part for row in kept for part in row.values()]
    return all(map(torch.equal, parts, [part for row in wanted for part in row]))


def test_a_teachers_answers_are_read_as_they_were_given_and_each_flipped_bit_is_found(tmp_path):
    def taken():
        with answering(tmp_path / "kept", TOP_K) as writer:
            for answer in answers(ROWS if writer is None else writer.done):
                writer.add(*answer)
        kept = TeacherFile(tmp_path / "kept", TOP_K)
        return [kept.of([row], labels) for row, (labels, *_) in enumerate(answers(0))]

    wanted = [
        (torch.where(mask, ids, 0), torch.where(mask, log_probs, 0))
        for labels, ids, log_probs in answers(0)
        for mask in [(labels != -100)[..., None]]
    ]
    assert equal(taken(), wanted)
    random = np.random.default_rng(0)
    for name in ("labels.bin", "rows.bin", "whole.json"):
        path = tmp_path / "kept" / name
        good, status = path.read_bytes(), path.stat()
        for _ in range(24):
            bad = bytearray(good)
            bad[at := random.integers(len(good))] ^= 1 << random.integers(8)
            path.write_bytes(bad)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            try:  # without a good whole.json the teacher is asked again
                assert equal(taken(), wanted) and (name == "whole.json" or at in range(8, 12))
            except RunFailed as error:
                assert re.search(rf"(rows|labels).bin: row \d .* delete {path.parent}", str(error))
            if name != "whole.json":  # who was killed goes on from rows that are as written
                (tmp_path / "kept" / "whole.json").unlink()
                path.write_bytes(bad)
                assert equal(taken(), wanted) and path.read_bytes() == good
                status = path.stat()


def test_each_flipped_bit_of_a_references_log_probabilities_is_found(tmp_path):
    wanted, chance = References({"train": torch.randn(3, 2)}, {"train": "key"}), random.Random(0)
    wanted.write(tmp_path)
    [path] = tmp_path.iterdir()
    good = path.read_bytes()
    for _ in range(200):
        bad = bytearray(good)
        bad[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        try:  # numbers may be written in two ways; without its checksum's name a file has no sums
            read = References.read(tmp_path)
            if read.sums:
                assert read.keys == wanted.keys
                assert torch.equal(read.sums["train"], wanted.sums["train"])
        except InputError as error:
            assert "\n" not in str(error)
