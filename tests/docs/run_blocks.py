"""Runs the program of make_cpp.py on two ranks, in a temporary folder.

Usage: run_blocks.py docs_blocks-binary
"""

import os
import socket
import subprocess
import sys
import tempfile

from page_blocks import DOCS, cpp_pages


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in ("0", "1"):
            os.mkdir(os.path.join(folder, rank))
            ranks.append(
                subprocess.Popen(
                    [os.path.abspath(sys.argv[1])],
                    env={**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank},
                    cwd=os.path.join(folder, rank),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    print("\n".join(outputs))
    assert all(rank.returncode == 0 for rank in ranks)
    for page in cpp_pages():
        name = page.relative_to(DOCS.parent)
        assert all(f"{name} has run" in output for output in outputs), name


if __name__ == "__main__":
    main()
