"""Is a job that runs the T5 example: `t5_jobs.py NAME OUT`. OPTIONS has its options as JSON."""

import json
import os
import sys
from pathlib import Path

from thalweg.examples import t5_fsdp

if __name__ == "__main__":
    code = t5_fsdp.main(json.loads(os.environ["OPTIONS"]))
    Path(sys.argv[2]).write_text(json.dumps(code), encoding="utf-8")
