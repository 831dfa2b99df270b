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
from torch.utils._pytree import tree_structure, treespec_dumps, treespec_loads
from transformers import GenerationConfig, exporters

from dsv4_gen import DeepseekV4StaticCache, export_generation, load_exported
from dsv4_gen.cli import main
from dsv4_gen.exporting.check import same_tokens

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
    assert copied["decode"] <= 3 * 8 * ROWS  # and a step copies three counters at most


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


@pytest.mark.slow
@pytest.mark.xdist_group("pt2")
def test_a_cache_that_does_not_fit_the_programs_is_refused():
    exported = load_exported(exported_folder("pt2"))
    ids = random_ids(ROWS, 4)
    other_dtype = DeepseekV4StaticCache(MODEL.config, CAPACITY)
    other_dtype.early_initialization(ROWS, 1, MODEL.config.head_dim, torch.bfloat16, "cpu")
    for cache, difference in [
        (DeepseekV4StaticCache(MODEL.config, CAPACITY + 1), "another `max_cache_len`: 160, but this one has 161"),
        (DeepseekV4StaticCache(MODEL.config, CAPACITY, max_rollback=3), "another `max_rollback`"),
        (DeepseekV4StaticCache(tiny_model(layer_types=[CSA, HCA]).config, CAPACITY), "another `layer_types`"),
        (other_dtype, "another dtype: torch.float32, but this one has torch.bfloat16"),
    ]:
        with pytest.raises(ValueError, match=difference):
            exported(ids, cache=cache)
    with pytest.raises(ValueError, match="holds 2 rows, but the call has 1"):
        exported.generate(ids[:1], max_new_tokens=4)
    with pytest.raises(ValueError, match="max_cache_len=160"):
        exported.generate(ids, max_new_tokens=CAPACITY)
    with pytest.raises(ValueError, match="cannot verify drafts"):
        exported.generate(ids, max_new_tokens=4, prompt_lookup_num_tokens=3)


def test_what_cannot_be_exported_or_loaded_is_refused(tmp_path, monkeypatch):
    sizes = {"format": "onnx", "max_cache_len": 32}
    for changes, message in [
        ({"format": "tflite"}, "must be one of onnx, openvino, pt2, aoti, got 'tflite'"),
        ({"batch_size": 0}, "`batch_size` must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            export_generation(MODEL, tmp_path, **sizes | changes)
    with pytest.raises(ValueError, match=r"call `model.float\(\)`"):
        export_generation(tiny_model(dtype=torch.bfloat16, layer_types=[CSA]), tmp_path, **sizes)
    MODEL.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is not a folder of `export_generation`"):
        load_exported(tmp_path)
    monkeypatch.setattr("dsv4_gen.exporting.formats.find_spec", lambda package: None)
    with pytest.raises(ImportError, match=r"onnx, onnxscript, onnxruntime: `pip install dsv4_gen\[onnx\]`"):
        export_generation(MODEL, tmp_path, **sizes)


def test_what_a_cache_is_made_for_can_be_written_down_and_read_again():
    cache = DeepseekV4StaticCache(MODEL.config, CAPACITY, max_rollback=3)
    cache.early_initialization(ROWS, 1, MODEL.config.head_dim, torch.float32, "cpu")
    tree = tree_structure(cache)
    assert treespec_loads(treespec_dumps(tree)) == tree


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Dynamo", "Onnx", "OpenVINO"])
def test_upstreams_own_exporters_export_load_and_run(kind, tmp_path):
    model, ids = tiny_model(layer_types=[CSA]), random_ids(1, 9)
    settings = GenerationConfig(cache_implementation="static", max_cache_len=64, do_sample=False, eos_token_id=None)
    exporter, config = getattr(exporters, f"{kind}Exporter"), getattr(exporters, f"{kind}Config")(dynamic=False)
    exported = exporter().export_for_generation(model, {"input_ids": ids}, config, generation_config=settings)
    exported.save_pretrained(tmp_path)
    # OpenVINO computes in bfloat16 where the CPU can, if it is not told.
    precision = {"config": {"INFERENCE_PRECISION_HINT": "f32"}} if kind == "OpenVINO" else {}
    runners = exporters.ExportedModel.from_pretrained(tmp_path, trust_remote_code=True, **precision).runners

    mine, theirs = (DeepseekV4StaticCache(model.config, max_cache_len=64) for _ in range(2))
    theirs.early_initialization(1, 1, model.config.head_dim, torch.float32, "cpu")
    for step in range(40):
        mask = torch.ones_like(ids).bool()
        output = runners["prefill" if step == 0 else "decode"](input_ids=ids, cache=theirs, token_mask=mask)
        logits, theirs = output.logits[:, -1:], output.cache
        with torch.no_grad():
            wanted = model(input_ids=ids, cache=mine, logits_to_keep=1).logits
        torch.testing.assert_close(logits, wanted, atol=TOLERANCE, rtol=0)
        for name, tensor in mine.counters().items():
            assert torch.equal(theirs.counters()[name], tensor)
        ids = logits.argmax(-1)


@pytest.mark.slow
def test_the_command_exports_prints_sizes_and_compares_the_tokens(tmp_path, capsys, monkeypatch):
    MODEL.save_pretrained(tmp_path / "model")
    command = ["export", "--model", str(tmp_path / "model"), "--format", "pt2", "--max-cache-len", "16"]
    command += ["--batch", "2", "--chunk", "4", "--out", str(tmp_path / "out")]
    main(command)
    assert load_exported(tmp_path / "out").batch_size == 2
    lines = capsys.readouterr().out
    assert "MiB" in lines and "give the tokens of the model" in lines
    monkeypatch.setattr("dsv4_gen.exporting.check.load_exported", with_other_tokens)
    assert not same_tokens(MODEL, tmp_path / "out")
    with pytest.raises(SystemExit):
        main([*command[:-6], "--batch", "0", *command[-4:]])
    assert "`batch_size` must be at least 1, got 0" in capsys.readouterr().err


def with_other_tokens(folder):
    """The programs of a folder, whose tokens are all one further than they were."""
    exported = load_exported(folder)
    for name, program in exported.programs.items():
        exported.programs[name] = lambda *call, program=program: program(*call).roll(1, dims=-1)
    return exported
