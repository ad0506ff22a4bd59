import pathlib
import subprocess
import sys
import sysconfig

import pytest

PATCHES = pathlib.Path(__file__).resolve().parents[2] / "patches"
sys.path.insert(0, str(PATCHES))
import apply  # noqa: E402

PATCH = """Why: a test.
Upstream: no-such-distribution==1.0

--- a/pkg/mod.py
+++ b/pkg/mod.py
@@ -1,3 +1,4 @@
 first
-second
+second, patched
+third
 last
--- /dev/null
+++ b/pkg/new.py
@@ -0,0 +1,2 @@
+one
+two
"""


@pytest.fixture
def site(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "mod.py").write_text("first\nsecond\nlast\n")
    patches = tmp_path / "patches"
    patches.mkdir()
    (patches / "test.patch").write_text(PATCH)
    return tmp_path


def test_check_changes_nothing_and_apply_is_idempotent(site):
    patches = site / "patches"
    assert apply.run(site, check=True, patch_dir=patches) == ["test.patch: applies"]
    assert (site / "pkg" / "mod.py").read_text() == "first\nsecond\nlast\n"
    assert apply.run(site, check=False, patch_dir=patches) == ["test.patch: applied"]
    assert (site / "pkg" / "mod.py").read_text() == "first\nsecond, patched\nthird\nlast\n"
    assert (site / "pkg" / "new.py").read_text() == "one\ntwo\n"
    assert apply.run(site, check=False, patch_dir=patches) == ["test.patch: already applied"]


def test_a_hard_linked_original_is_not_written(site):
    cached = site / "cached.py"
    cached.hardlink_to(site / "pkg" / "mod.py")
    apply.run(site, check=False, patch_dir=site / "patches")
    assert cached.read_text() == "first\nsecond\nlast\n"


def test_a_package_that_was_reinstalled_is_patched_again(site):
    apply.run(site, check=False, patch_dir=site / "patches")
    (site / "pkg" / "mod.py").write_text("first\nsecond\nlast\n")
    assert apply.run(site, check=False, patch_dir=site / "patches") == ["test.patch: applied"]


def test_a_patch_that_does_not_fit_is_refused_before_anything_is_written(site):
    (site / "pkg" / "mod.py").write_text("first\nother\nlast\n")
    with pytest.raises(apply.PatchError, match=r"test.patch does not apply to pkg/mod.py.*no-such-distribution"):
        apply.run(site, check=False, patch_dir=site / "patches")
    assert not (site / "pkg" / "new.py").exists()


def test_the_project_s_patches_are_applied_here():
    report = apply.run(pathlib.Path(sysconfig.get_paths()["purelib"]), check=True)
    assert report and all(line.endswith("already applied") for line in report)


def test_every_patch_says_why_and_until_when():
    for patch in PATCHES.glob("*.patch"):
        header = patch.read_text().split("\n--- ")[0]
        assert all(field in header for field in ("Why: ", "Upstream: ", "Remove when: ", "Test: ")), patch.name


def driver_missing() -> bool:
    code = "from sgl_kernel.no_cuda_driver import is_driver_missing; print(is_driver_missing())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True\n"


@pytest.mark.skipif("not driver_missing()", reason="this machine has the CUDA driver: the real sgl_kernel is loaded")
def test_sgl_kernel_imports_without_a_driver_and_names_the_kernel_that_is_called():
    code = """
import sgl_kernel
from sgl_kernel import rmsnorm
from sgl_kernel.flash_attn import flash_attn_varlen_func
from sgl_kernel.scalar_type import scalar_types
assert scalar_types.uint4b8.size_bits == 4
for kernel in (rmsnorm, flash_attn_varlen_func):
    try:
        kernel()
    except NotImplementedError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "sgl_kernel.rmsnorm needs the CUDA driver" in done.stdout
    assert "sgl_kernel.flash_attn.flash_attn_varlen_func needs the CUDA driver" in done.stdout
