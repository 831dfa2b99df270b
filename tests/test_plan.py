"""Memory that can be planned: the plan is what gets allocated, and the command says it with units."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CACHE_SIZES, CSA, HCA, SLIDING, allocated_cache, tiny_config

from dsv4_gen.cli import format_bytes, main
from dsv4_gen.memory import longest_context, plan_cache_memory, public_config
from dsv4_gen.tables import print_table


@settings(max_examples=60)
@given(**CACHE_SIZES, max_compressed_len=st.sampled_from([None, 400]))
def test_the_plan_is_what_gets_allocated_by_layer_kind_and_in_all(
    layer_types, max_cache_len, batch_size, dtype, max_rollback, max_compressed_len
):
    config, sizes = tiny_config(layer_types=layer_types), {"max_rollback": max_rollback}
    sizes["max_compressed_len"] = max_compressed_len
    cache = allocated_cache(config, max_cache_len, batch_size, dtype, **sizes)
    plan = plan_cache_memory(config, max_cache_len, batch_size=batch_size, dtype=dtype, **sizes)
    assert plan.total == cache.nbytes
    for kind in plan.kinds:
        tensors = [layer.tensors().items() for layer in cache.layers if layer.kind == kind.kind]
        entries = sum(tensor.nbytes for layer in tensors for name, tensor in layer if name.endswith("entries"))
        assert (kind.layers, kind.entries) == (layer_types.count(kind.kind), entries)
        assert kind.fixed == sum(tensor.nbytes for layer in tensors for _, tensor in layer) - entries


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_bytes_per_token_are_what_a_longer_context_adds(batch_size):
    config = tiny_config()
    short, long = (plan_cache_memory(config, tokens, batch_size=batch_size) for tokens in (1600, 3200))
    assert (long.total - short.total) / 1600 == short.per_token == long.per_token
    assert short.fixed == long.fixed


@pytest.mark.parametrize(
    ("model", "tokens", "size"),
    [
        ("flash", 4096, "38.30 MiB"),
        ("flash", 131_072, "871.42 MiB"),
        ("flash", 1_048_576, "6.73 GiB"),
        ("pro", 4096, "47.58 MiB"),
        ("pro", 131_072, "1.22 GiB"),
        ("pro", 1_048_576, "9.63 GiB"),
    ],
)
def test_the_public_models(model, tokens, size):
    plan = plan_cache_memory(public_config(model), tokens)
    assert format_bytes(plan.total) == size
    if tokens == 4096:
        assert plan.total == allocated_cache(public_config(model), tokens).nbytes


def test_the_public_models_have_the_layers_of_their_checkpoints():
    ratios = {"flash": [0, 0] + [4, 128] * 20 + [4], "pro": [128, 128] + [4, 128] * 29 + [4]}
    kind = {0: SLIDING, 4: CSA, 128: HCA}
    for name, compress_ratios in ratios.items():
        assert public_config(name).layer_types == [kind[ratio] for ratio in compress_ratios]


@settings(max_examples=40)
@given(st.integers(0, 3_000_000), st.integers(1, 3), st.integers(0, 40))
def test_the_longest_context_fits_and_one_token_more_does_not(memory, batch_size, max_rollback):
    config, sizes = tiny_config(), {"batch_size": batch_size, "max_rollback": max_rollback}
    tokens = longest_context(config, memory, **sizes)
    assert tokens == 0 or plan_cache_memory(config, tokens, **sizes).total <= memory
    if tokens < config.max_position_embeddings:
        assert plan_cache_memory(config, tokens + 1, **sizes).total > memory


@pytest.mark.parametrize("sizes", [{"batch_size": 0}, {"max_rollback": -1}, {"max_compressed_len": 3}])
def test_a_plan_for_a_cache_that_cannot_be_is_refused(sizes):
    with pytest.raises(ValueError, match=next(iter(sizes))):
        plan_cache_memory(tiny_config(), 64, **sizes)


def test_the_command_prints_every_number_with_its_unit(capsys):
    main(["plan", "--model", "flash", "--context", "1048000", "--new-tokens", "576", "--memory", "2 GiB"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[3] == "2 sliding 258.00 KiB 0.0 B 0 B 258.00 KiB".split()
    assert lines[4] == "21 CSA 3.57 MiB 6,720.0 B 6.56 GiB 6.57 GiB".split()
    assert lines[5] == "20 HCA 7.56 MiB 160.0 B 160.02 MiB 167.58 MiB".split()
    assert lines[6] == "43 in all 11.38 MiB 6,880.0 B 6.72 GiB 6.73 GiB".split()
    assert "7,226,181,912 bytes" in " ".join(lines[7])
    assert f"fit {longest_context(public_config('flash'), 2 * 2**30):,} tokens per row" in " ".join(lines[8])


def test_a_table_is_printed_whole_where_the_terminal_is_narrower(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "10")
    print_table([{"a [long] name": 12345678, "b": True, "c": 1234.56}, {"a [long] name": 1, "b": False, "c": 0.0}])
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert "a [long] name" in header
    assert [row.split() for row in rows] == [["12,345,678", "yes", "1,234.6"], ["1", "NO", "0.0"]]
    assert rows[0].index("8 ") == rows[1].index("1 ")  # to the right


def test_the_command_plans_a_checkpoint_folder_with_batch_dtype_and_rollback(tmp_path, capsys):
    config = tiny_config()
    config.save_pretrained(tmp_path)
    options = "--context 90 --batch 2 --dtype float32 --max-rollback 5"
    main(["plan", "--model", str(tmp_path), *options.split()])
    cache = allocated_cache(config, 90, batch_size=2, dtype=torch.float32, max_rollback=5)
    assert f"Exactly {cache.nbytes:,} bytes" in capsys.readouterr().out


def test_the_command_plans_for_all_positions_by_default(capsys):
    main(["plan", "--model", "pro", "--new-tokens", "76"])
    output = capsys.readouterr().out
    assert "(1,048,500 of context, 76 new)" in output and "9.63 GiB" in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model nowhere", "must be flash, pro, or a folder with a config.json"),
        ("--model flash --context 0", "--context must be at least 1"),
        ("--model flash --new-tokens -1", "--new-tokens must be at least 0"),
        ("--model flash --batch 0", "--batch must be at least 1"),
        ("--model flash --max-rollback -1", "--max-rollback must be at least 0"),
        ("--model flash --context 1048576 --new-tokens 1", "has 1,048,576 positions"),
        ("--model flash --new-tokens 1048576", "has 1,048,576 positions"),
        ("--model flash --memory 80", "a number and its unit, such as 80GiB"),
        ("--model flash --memory 80iB", "a number and its unit, such as 80GiB"),
        ("--model flash --dtype int8", "invalid choice"),
        ("", "required: --model"),
    ],
)
def test_a_bad_option_says_what_to_give(options, message, capsys):
    with pytest.raises(SystemExit):
        main(["plan", *options.split()])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("text", "message"), [('{"model_type": "llama"}', "one of DeepSeek-V4"), ("{", "read")])
def test_a_folder_of_another_model_is_refused(text, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SystemExit):
        main(["plan", "--model", str(tmp_path)])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "tokens"), [("100000B", 100_000), ("1.5MB", 1_500_000), ("2MiB", 2 * 2**20), ("700 KiB", 700 * 2**10)]
)
def test_decimal_and_binary_units_are_told_apart(text, tokens, tmp_path, capsys):
    tiny_config().save_pretrained(tmp_path)
    main(["plan", "--model", str(tmp_path), "--memory", text])
    assert f"fit {longest_context(tiny_config(), tokens):,} tokens" in capsys.readouterr().out
