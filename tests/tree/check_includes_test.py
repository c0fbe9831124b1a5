"""Tests of check_includes.py, on small trees made for each case."""

import pathlib
import tempfile
import unittest

import check_includes


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

    def complaints_about(self, path: str, *lines: str) -> list[str]:
        self.write(path, "\n".join(lines))
        return check_includes.check(self.root)

    def assert_allowed(self, path: str, *lines: str):
        self.assertEqual(self.complaints_about(path, *lines), [])

    def assert_forbidden(self, path: str, line: str, because: str):
        found = self.complaints_about(path, "// A comment.", line)
        self.assertEqual(len(found), 1, found)
        self.assertTrue(found[0].startswith(f"{path}:2: {line}: "), found[0])
        self.assertIn(because, found[0])

    def test_planning_includes_the_standard_library_abseil_and_itself(self):
        self.assert_allowed("planning/a.cc", "#include <vector>", '#include "brigade/planning/planning.h"',
                            "#include <absl/status/status.h>")

    def test_planning_must_not_include_libtorch(self):
        self.assert_forbidden("planning/a.h", "#include <torch/torch.h>", "planning/ may include only")

    def test_planning_must_not_include_libtorch_by_way_of_c10(self):
        self.assert_forbidden("planning/a.h", "#include <c10/util/Exception.h>", "may include only")

    def test_hooks_must_not_include_c10d(self):
        self.assert_forbidden("hooks/a.cc", "#include <torch/csrc/distributed/c10d/Work.hpp>", "may not")

    def test_a_lower_folder_must_not_include_a_higher_one(self):
        self.assert_forbidden("comm/a.cc", '#include "brigade/reducer/reducer.h"', "only comm")

    def test_siblings_must_not_include_each_other(self):
        self.assert_forbidden("hooks/a.cc", '#include "brigade/comm/comm.h"', "only hooks")

    def test_a_folder_may_include_what_the_folders_below_it_may(self):
        self.assert_allowed("ddp/a.cc", '#include "brigade/planning/planning.h"', "#include <torch/torch.h>")

    def test_only_comm_and_those_above_see_gloo(self):
        self.assert_allowed("comm/a.cc", "#include <gloo/context.h>")
        self.assert_forbidden("hooks/a.cc", "#include <gloo/context.h>", "may include only")

    def test_a_front_includes_what_lies_inside_of_its_folder(self):
        self.assert_allowed("comm/a.cc", '#include "brigade/comm/ordered/ordered.h"')

    def test_what_lies_inside_must_not_include_its_front(self):
        self.assert_forbidden("comm/ordered/a.cc", '#include "brigade/comm/comm.h"', "may include only")

    def test_what_lies_inside_is_in_layers_too(self):
        self.assert_allowed("comm/ordered/a.cc", '#include "brigade/comm/streams/streams.h"')
        self.assert_forbidden(
            "comm/streams/a.cc", '#include "brigade/comm/ordered/ordered.h"', "may include only"
        )

    def test_a_folder_that_no_layer_names_is_an_error(self):
        self.assertEqual(
            self.complaints_about("fsdp/more/a.cc", ""),
            ["fsdp/more/a.cc: LAYERS has no such folder"],
        )

    def test_sharding_is_beside_the_reducer_not_on_it(self):
        self.assert_forbidden("fsdp/a.cc", '#include "brigade/reducer/reducer.h"', "may include only")

    def test_cuda_headers_are_for_reducer_and_comm(self):
        self.assert_allowed("reducer/a.cu", "#include <cuda_runtime.h>")
        self.assert_forbidden("hooks/a.cc", "#include <cuda_runtime.h>", "may include only")

    def test_own_headers_are_named_from_brigade(self):
        self.assert_forbidden("hooks/a.cc", '#include "hooks.h"', "brigade/<folder>/<file>.h")

    def test_no_two_files_need_each_other(self):
        self.write("ddp/a.h", "")
        self.write("ddp/a.cc", '#include "brigade/ddp/a.h"\n#include "brigade/ddp/b.h"')
        self.write("ddp/b.h", "")
        self.write("ddp/b.cc", '#include "brigade/ddp/c.h"')
        self.assert_allowed("ddp/c.h", '#include "brigade/comm/comm.h"')
        found = self.complaints_about("ddp/c.cc", '#include "brigade/ddp/a.h"')
        self.assertEqual(len(found), 1, found)
        self.assertEqual(sorted(set(found[0].split(" needs "))), ["ddp/a", "ddp/b", "ddp/c"])

    def test_an_included_header_of_ours_exists(self):
        self.assert_forbidden("ddp/a.cc", '#include "brigade/ddp/nothing.h"', "no such file")


if __name__ == "__main__":
    unittest.main()
