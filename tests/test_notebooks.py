"""The notebooks run from top to bottom, and what is stored of them says nothing about the machine that ran them."""

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
MACHINE_PATH = re.compile(r"(?<![\w./-])/(work|root|home|tmp|Users|opt|usr|var)\b")


def stored_outputs(path):
    """Every output that a notebook holds, by cell number."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return {n: cell["outputs"] for n, cell in enumerate(cells) if cell["cell_type"] == "code"}


def without_pictures(output):
    """An output as text, less what is base64, in which any letters may turn up."""
    data = {kind: value for kind, value in output.get("data", {}).items() if not kind.startswith("image/")}
    return json.dumps(output | {"data": data})


def test_there_are_notebooks():
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_complete_and_name_no_machine(path):
    outputs = [output for of_cell in stored_outputs(path).values() for output in of_cell]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    for output in outputs:
        assert output["output_type"] != "error" and output.get("name") != "stderr", output
        assert not MACHINE_PATH.search(without_pictures(output)), output


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path):
    for module in ("matplotlib", "ipykernel"):
        pytest.importorskip(module, reason=f"running notebooks needs {module}")
    nbclient = pytest.importorskip("nbclient", reason="running notebooks needs nbclient")
    nbformat = pytest.importorskip("nbformat", reason="running notebooks needs nbformat")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
