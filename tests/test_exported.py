"""Exported programs: what one process exports another runs, without the model, and it gives the model's numbers."""

import os
import shutil
import subprocess
import sys
from functools import cache as once
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from exported_elsewhere import converse
from test_exact import TOLERANCE
from tiny import CSA, HCA, random_ids, tiny_model

from dsv4_gen import DeepseekV4StaticCache, export_generation, load_exported

MODEL = tiny_model(layer_types=[HCA, CSA])
CAPACITY, ROWS, CHUNK = 160, 2, 8
FORMATS = {"pt2": "torch", "onnx": "onnxruntime", "openvino": "openvino", "aoti": "torch"}
# All tests of a format run in one process, which exports once.
each_format = pytest.mark.parametrize(
    "format", [pytest.param(name, marks=[pytest.mark.slow, pytest.mark.xdist_group(name)]) for name in FORMATS]
)


@once
def exported_folder(format: str) -> Path:
    pytest.importorskip(FORMATS[format])
    folder = Path(mkdtemp()) / format
    sizes = {"max_cache_len": CAPACITY, "batch_size": ROWS, "prefill_chunk_size": CHUNK}
    export_generation(MODEL, folder, format=format, **sizes)
    return folder


def turns_of(*lengths, padding, seed):
    """Prompts, rows padded differently, and the messages after the answers: the model's text so far, then new ids."""
    text, mask = random_ids(ROWS, 0), torch.ones(ROWS, 0, dtype=torch.long)
    cache, turns = DeepseekV4StaticCache(MODEL.config, CAPACITY), []
    for turn, (length, new_tokens) in enumerate(lengths):
        ids, new_mask = random_ids(ROWS, length, seed=seed + turn), torch.ones(ROWS, length, dtype=torch.long)
        ids[0, :padding] = new_mask[0, :padding] = 0
        text, mask = torch.cat([text, ids], dim=1), torch.cat([mask, new_mask], dim=1)
        turns.append((text, mask, new_tokens))
        [(text, _)] = converse(MODEL, turns[-1:], cache)
        mask = torch.cat([mask, torch.ones(ROWS, new_tokens, dtype=torch.long)], dim=1)
    return turns


@each_format
def test_programs_give_the_models_answers_in_another_process(format, tmp_path):
    first = turns_of((19, 100), padding=7, seed=0)
    second = turns_of((8, 9), (5, 12), (1, 3), padding=0, seed=10)
    torch.save((first, second), tmp_path / "turns")
    command = [sys.executable, "exported_elsewhere.py", exported_folder(format), tmp_path / "turns", tmp_path / "out"]
    subprocess.run(command, check=True, cwd=Path(__file__).parent, timeout=120)
    answers, stayed, copied = torch.load(tmp_path / "out")

    expected = converse(MODEL, first, DeepseekV4StaticCache(MODEL.config, CAPACITY))
    expected += converse(MODEL, second, DeepseekV4StaticCache(MODEL.config, CAPACITY))
    for (tokens, logits), (wanted_tokens, wanted_logits) in zip(answers, expected, strict=True):
        assert torch.equal(tokens, wanted_tokens)
        torch.testing.assert_close(logits, wanted_logits, atol=TOLERANCE, rtol=0)
    assert stayed  # the state is where it was
    assert copied.get("decode", 0) <= 3 * 8 * ROWS  # and a step copies three counters at most


@each_format
def test_sampling_and_the_end_of_each_row_are_transformers_own(format):
    exported = load_exported(exported_folder(format))
    ids = random_ids(ROWS, 12)
    settings = {"do_sample": True, "top_p": 0.8, "repetition_penalty": 1.3, "max_new_tokens": 30, "pad_token_id": 0}
    for eos in (None, list(range(1, 16))):
        torch.manual_seed(0)
        wanted = MODEL.generate(ids, cache_implementation="static", eos_token_id=eos, **settings)
        torch.manual_seed(0)
        assert torch.equal(exported.generate(ids, eos_token_id=eos, **settings), wanted)
    assert (wanted == 0).any()  # one row ended before the other


@each_format
def test_a_truncated_program_is_refused(format, tmp_path):
    folder = shutil.copytree(exported_folder(format), tmp_path / "truncated")
    largest = max(folder.iterdir(), key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    with pytest.raises(ValueError, match="truncated, damaged or of another format"):
        load_exported(folder)
