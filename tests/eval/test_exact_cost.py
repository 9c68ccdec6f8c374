"""`python -m eval exact`: ratios with their spread, and rows that differ in some bit, counted in both modes."""

import json

import pytest

from eval.__main__ import main


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_cost_of_exact_mode_is_measured(dtype, capsys):
    given = ["exact", "--shape", "tiny", "--dtype", dtype, "--batch-sizes", "2", "--tokens", "6", "--repeats", "2"]
    assert main([*given, "--context", "20", "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    *table, line = printed.out.splitlines()
    record = json.loads(line)
    assert record["target"]["synthetic"] and table[0].startswith(f"synthetic tiny, {dtype}")
    (batch,) = record["batches"]
    for cost in batch["cost"].values():
        assert 0 < cost["lowest"] <= cost["median"] <= cost["highest"]
    assert batch["differing"]["exact"] == {"tokens": 0, "bits": 0, "rows": 2}
    assert batch["differing"]["ordinary"]["rows"] == 2
    assert (record["blocks"] is None) == (record["engine"] == "compiled")


def test_an_unknown_shape_is_one_sentence(capsys):
    assert main(["exact", "--shape", "llama-9"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("eval: shape must be one of tiny")
