"""Tests of check_includes.py on small trees."""

import pathlib
import tempfile
import unittest

import check_includes

# File, its include, and a part of the reported violation; None if it is allowed.
CASES = [
    ("planning/a.cc", '"brigade/planning/planning.h"', None),
    ("planning/a.cc", "<absl/status/status.h>", None),
    ("planning/a.h", "<torch/torch.h>", "planning/ may include only"),
    ("planning/a.h", "<c10/util/Exception.h>", "may include only"),
    ("hooks/a.cc", "<torch/csrc/distributed/c10d/Work.hpp>", "may not"),
    ("hooks/a.cc", '"brigade/comm/comm.h"', "only hooks"),
    ("hooks/a.cc", "<gloo/context.h>", "may include only"),
    ("hooks/a.cc", "<cuda_runtime.h>", "may include only"),
    ("hooks/a.cc", '"hooks.h"', "brigade/<folder>/<file>.h"),
    ("reducer/a.cu", "<cuda_runtime.h>", None),
    ("comm/a.cc", '"brigade/reducer/reducer.h"', "only comm"),
    ("comm/a.cc", "<gloo/context.h>", None),
    ("comm/a.cc", '"brigade/comm/ordered/ordered.h"', None),
    ("comm/ordered/a.cc", '"brigade/comm/comm.h"', "may include only"),
    ("comm/ordered/a.cc", '"brigade/comm/streams/streams.h"', None),
    ("comm/streams/a.cc", '"brigade/comm/ordered/ordered.h"', "may include only"),
    ("fsdp/a.cc", '"brigade/reducer/reducer.h"', "may include only"),
    ("ddp/a.cc", '"brigade/planning/planning.h"', None),
    ("ddp/a.cc", '"brigade/ddp/nothing.h"', "no such file"),
]


class CheckIncludesTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for name in check_includes.LAYERS:
            self.write(f"{name}/{pathlib.Path(name).name}.h", "")

    def write(self, path: str, text: str):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def test_each_folder_follows_its_rules(self):
        for path, include, reason in CASES:
            self.write(path, f"// A comment.\n#include {include}")
            found = check_includes.check(self.root)
            (self.root / path).unlink()
            with self.subTest(f"{path}: {include}"):
                self.assertEqual(len(found), reason is not None, found)
                for line in found:
                    self.assertTrue(line.startswith(f"{path}:2: #include {include}: "), line)
                    self.assertIn(reason, line)

    def test_a_folder_outside_of_layers_is_an_error(self):
        self.write("fsdp/more/a.cc", "")
        self.assertEqual(
            check_includes.check(self.root), ["fsdp/more/a.cc: its folder is not in LAYERS"])

    def test_a_cycle_of_files_is_an_error(self):
        self.write("ddp/a.h", "")
        self.write("ddp/a.cc", '#include "brigade/ddp/a.h"\n#include "brigade/ddp/b.h"')
        self.write("ddp/b.h", "")
        self.write("ddp/b.cc", '#include "brigade/ddp/c.h"')
        self.write("ddp/c.h", '#include "brigade/comm/comm.h"')
        self.assertEqual(check_includes.check(self.root), [])
        self.write("ddp/c.cc", '#include "brigade/ddp/a.h"')
        (found,) = check_includes.check(self.root)
        self.assertEqual(sorted(set(found.split(" includes "))), ["ddp/a", "ddp/b", "ddp/c"])


if __name__ == "__main__":
    unittest.main()
