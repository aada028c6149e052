"""Runs a notebook on one of two nodes: `notebook.py NODE PORT PHASE FOLDER`.

Two workers, which Accelerate forks from its kernel and starts again once, train as those of
accelerated.py do; see common.py.
"""

import sys
from pathlib import Path

import nbformat
from kernels import Kernels
from nbclient import NotebookClient

CELL = """
import sys
sys.path.insert(0, {clients!r})
from accelerate import notebook_launcher

def work():
    from accelerated import train
    from common import main
    sys.argv = ["notebook", {phase!r}, {folder!r}]
    main(train)

notebook_launcher(
    work, num_processes=2, num_nodes=2, node_rank={node}, max_restarts=1,
    rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:{port}", rdzv_id="notebooks")
"""


def main(node: str, port: str, phase: str, folder: str) -> None:
    clients = str(Path(__file__).parent)
    text = CELL.format(clients=clients, node=node, port=port, phase=phase, folder=folder)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text)])
    NotebookClient(notebook, kernel_manager_class=Kernels).execute()
    for output in notebook.cells[0].outputs:
        print(output.get("text", ""), end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
