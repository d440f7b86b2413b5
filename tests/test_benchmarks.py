"""The benchmarks run and print what they promise; figures are printed, never asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (
            ["engine.py", "--repeats", "1"],
            {"overhead_ms_per_silo_and_ask", "overhead_ms_per_silo_and_ask_pairwise"},
        ),
        (["walk.py"], {"fedsgd_functions", "fedsgd_files", "pbpfl_functions", "pbpfl_files"}),
        (["pbpfl.py", "--pairs", "1", "--only", "mlp4"], {"mlp4_mse_m1_ratio", "mlp4_mse_m1_server_ratio"}),
        pytest.param(
            ["peers.py", "--repeats", "1", "--silos", "3", "--rounds", "40", "--masks", "off,on"],
            {
                *("mlp_moretta_round_ms", "mlp_moretta_round_processor_ms", "mlp_moretta_start_s"),
                *("mlp_masks_moretta_start_processor_s", "mlp_masks_moretta_peak_mib"),
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["rounds.py", "--turns", "1", "--rounds", "2"],
            {"none_round_ms", "none_over_floor_ratio", "none_in_workers_ratio"}
            | {f"pairwise{ring}_over_floor_ratio" for ring in ("", "_32")},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["start.py", "--repeats", "1"],
            {"import_s", "help_s", "slowest_help_s", "needed_s", "demo_s", "demo_over_needed_ratio"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["secure_aggregation.py", "--pairs", "1", "--parameters", "1000", "--cohort", "5"],
            {
                *(f"masking_over_floor_ratio_{bits}" for bits in (32, 64)),
                *("setup_ms", "setup_ms_signed", "recovery_server_ms"),
                *("secure_over_plain_round_ratio", "additive_over_pairwise_ratio"),
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["noise.py", "--pairs", "1", "--hidden", "8"],
            {"noise_ms", "removal_ms", "keystream_ms", "noise_over_gradients_32_ratio", "noise_over_keystream_ratio"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["alignment.py", "--ids", "500", "--repeats", "1"],
            {"normalise_us_per_id", "encode_us_per_id", "blind_us_per_id", "align_seconds", "align_mib_sent"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["cgd.py", "--quick", "--data", ""],
            {"10x7_fused_over_plain_ratio", "10x7_naive_over_plain_ratio", "10x7_peak_mib", "plain_peak_mib"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["baffle.py", "--quick"],
            {
                *("lenet_torch_ratio", "combine_0.3m_randn_ratio", "combine_2.5m_ms"),
                *("upload_k100_bytes", "upload_k500_bytes_beyond_8k"),
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["together.py", "--pairs", "1", "--silos", "6"],
            {"fedavg_ratio", "fedsgd_ratio", "pbpfl_squared_error_ratio", "baffle_k_64_ratio"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["images_larger_than_memory.py", "--images", "40", "--rounds", "1"],
            {"decoded_mib", "files_mib", "peak_mib", "decoded_over_peak_ratio", "seconds"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["large_models.py", "--only", "resnet8"],
            {"resnet8_rounds_silo_ratio", "resnet8_pbpfl_rounds_server_times", "resnet8_fedsgd_rounds_silo_times"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda given: Path(given[0]).stem if isinstance(given, list) else "",
)
def test_a_benchmark_prints_one_object(arguments: list[str], keys: set[str]) -> None:
    done = subprocess.run(
        [sys.executable, *arguments, "--json"],
        cwd=FOLDER,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    told = json.loads(done.stdout)
    assert list(told) == ["benchmark", "command", "machine", "date", "figures", "about"]
    assert told["command"] == f"python benchmarks/{' '.join(arguments)} --json".replace("--data  ", "--data '' ")
    assert keys <= told["figures"].keys()
    for figure in told["figures"].values():
        assert {"median", "unit", "runs"} <= figure.keys() <= {"median", "unit", "runs", "quartiles"}
    assert all(told["figures"][key]["median"] > 0 for key in keys)
