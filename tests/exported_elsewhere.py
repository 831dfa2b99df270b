"""What a process does with exported programs that it did not export: `python exported_elsewhere.py FOLDER IN OUT`."""

import sys

import torch

import dsv4_gen


def converse(model, turns, cache):
    """Greedy answers to `turns` of `(ids, mask, new_tokens)`, each the whole text of the turn, and their logits."""
    answers = []
    for ids, mask, new_tokens in turns:
        settings = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        answer = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, cache=cache, **settings)
        answers.append((answer.sequences, torch.stack(answer.logits)))
    return answers


if __name__ == "__main__":
    folder, given, wanted = sys.argv[1:]
    torch.set_num_threads(1)
    exported = dsv4_gen.load_exported(folder)
    first, second = torch.load(given)
    cache = exported.new_cache()
    tensors = list(cache.tensors().values())
    answers = converse(exported, first, cache)
    cache.reset()
    answers += converse(exported, second, cache)
    stayed = all(mine is tensor for mine, tensor in zip(cache.tensors().values(), tensors))
    copied = {name: program.bytes_copied(cache) for name, program in exported.programs.items()}
    torch.save((answers, stayed, copied), wanted)
