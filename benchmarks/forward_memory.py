"""Where forward passes alone need less memory than backpropagation: a small language model's adapters, by length.

    OMP_NUM_THREADS=1 python benchmarks/forward_memory.py --json

Two silos train a Llama of 4 layers of 256 (1,000 words, random weights) with peft's LoRA of rank 4 on the next word, in
batches of 8 rows, for two rounds. Each case runs in a process of its own, so it needs transformers and peft.

*_forward_mib   baffle with 32 directions: the peak of resident memory over that before the model was built
*_backward_mib  the same of fedsgd
*_ratio         of forward over backward
*_seconds       the processor's, of the whole run

Of both, model, rows, server and sums are part of the peak: `base_mib` is that of fedsgd with two words a row.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from measure import begin_peak, figure, main, resident_mib
from torch import nn

from moretta import BAFFLE, Federation, FedSGD, Silo

WORDS, WIDTH, LAYERS, ROWS, DIRECTIONS, ROUNDS = 1000, 256, 4, 8, 32, 2
LENGTHS = (32, 64, 128, 256, 512)


def language(length: int) -> nn.Module:
    """Return a Llama with adapters that says the next word."""
    warnings.simplefilter("ignore")  # the libraries' own
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=4 * WIDTH, max_position_embeddings=length,
    )  # fmt: skip
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    model: nn.Module = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)
    return model


def silo(name: str, length: int) -> Silo:
    """Return a silo's rows: words, and at each the word after it."""
    words = np.random.default_rng(len(name)).integers(1, WORDS, (ROWS, length + 1))
    return Silo(name, words[:, :-1], words[:, 1:])


def measured(side: str, length: int) -> tuple[float, float]:
    """Return one case of this process: the peak in MiB over that before the model, and the run's seconds."""
    torch.set_num_threads(1)
    language(2)(torch.ones(1, 2, dtype=torch.long)).logits.sum().backward()  # the libraries load their own
    before = resident_mib("VmRSS")
    begin_peak()
    began = time.process_time()
    own: dict[str, Any] = {"loss": "cross-entropy", "learning_rate": 0.01}
    protocol = BAFFLE(k=DIRECTIONS, **own) if side == "forward" else FedSGD(**own)
    silos = [silo(name, length) for name in ("a", "bb")]
    Federation(language(length), silos, protocol, batch_size=0).train(ROUNDS, progress=False)
    return resident_mib("VmHWM") - before, time.process_time() - began


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure each case, one after the other."""
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    context = multiprocessing.get_context("spawn")
    about = dict[str, Any](rows=ROWS, directions=DIRECTIONS, words=WORDS, width=WIDTH, layers=LAYERS)

    def case(side: str, length: int) -> tuple[float, float]:
        with ProcessPoolExecutor(1, context) as process:
            figures = process.submit(measured, side, length).result()
        print(f"{side}, {length} words: {figures[0]:.0f} MiB", file=sys.stderr, flush=True)
        return figures

    found = about | {"base_mib": figure(case("backward", 2)[0], "MiB")}
    for length in LENGTHS[: 1 if arguments.quick else None]:
        peaks = {}
        for side in ("forward", "backward"):
            peaks[side], seconds = case(side, length)
            found |= {
                f"{length}_{side}_mib": figure(peaks[side], "MiB"),
                f"{length}_{side}_seconds": figure(seconds, "s"),
            }
        found[f"{length}_ratio"] = figure(peaks["forward"] / peaks["backward"], "times")
    return found


if __name__ == "__main__":
    main(__doc__ or "", run, ("--quick", {"action": "store_true", "help": "the shortest length alone"}))
