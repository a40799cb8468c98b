"""What is missing is found, with the command that mends it; only what is required makes the answer no."""

import re
import subprocess
import sys
from importlib import metadata

import pytest
from cache_worker import profile
from packaging.requirements import Requirement

from ds_adacc.cli import checks
from ds_adacc.cli.checks import Absent, Finding
from ds_adacc.profile.cache import ProfileCache
from ds_adacc.profile.cache_folder import default_path

CUDA13 = "pip install 'ds_adacc[cuda13]'"


@pytest.fixture
def without(monkeypatch):
    """Pretends that a distribution, and the module of the name, is not installed."""

    def pretend(*distributions, module):
        version = metadata.version

        def asked(name):
            if name in distributions:
                raise metadata.PackageNotFoundError(name)
            return version(name)

        monkeypatch.setattr(metadata, "version", asked)
        for name in (module, *(name for name in sys.modules if name.startswith(f"{module}."))):
            monkeypatch.setitem(sys.modules, name, None)

    return pretend


@pytest.fixture
def without_slow_checks(monkeypatch):
    for slow in ("_cbc", "_nvrtc", "_backend", "_import"):
        monkeypatch.setattr(checks, slow, lambda *_: "")


def by_name(findings):
    return {finding.name: finding for finding in findings}


def test_this_environment_is_fine(document):
    ProfileCache(default_path()).save("key", profile())
    code, told = document("doctor")
    assert code == 0
    assert list(told) == ["fine", "findings", "cache"] and told["fine"] is True
    found = {finding.pop("name"): finding for finding in told["findings"]}
    assert list(found)[:3] == ["Python", "torch", "deepspeed"]
    assert found["torch"] == {"fine": True, "required": True, "detail": metadata.version("torch"), "remedy": ""}
    assert found["CBC"]["detail"].startswith("solves a model in ")
    for name in ("reference", "cpu"):
        assert found[f"backend {name}"] == {"fine": True, "required": True, "detail": "runs here", "remedy": ""}
    size = (default_path() / "key.json").stat().st_size
    assert told["cache"] == {"path": str(default_path()), "bytes": size, "profiles": 1}


def test_the_tables_tell_it_in_words(said, monkeypatch):
    found = [
        Finding("torch", True, True, "2.13.0"),
        Finding("CuPy", False, False, "not [installed]", CUDA13),
        Finding("NVRTC", False, False, "none", CUDA13),
        Finding("CUDA devices", False, False, "none"),
    ]
    monkeypatch.setattr("ds_adacc.cli.doctor.findings", lambda: found)
    code, out, err = said("doctor")
    assert (code, err) == (0, "")
    rows = [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()]
    assert rows[2:6] == [
        ["torch", "yes", "required", "2.13.0"],
        ["CuPy", "NO", "optional", "not [installed]"],
        ["NVRTC", "NO", "optional", "none"],
        ["CUDA devices", "NO", "optional", "none"],
    ]
    assert out.endswith(f"\nTo fix:\n  CuPy, NVRTC: {CUDA13}\nds_adacc can run here\n")


def test_something_required_that_is_missing_is_no(said, monkeypatch):
    found = [Finding("mip", False, True, "not installed", "pip install 'mip>=2.0'"), Finding("torch", True, True, "2")]
    monkeypatch.setattr("ds_adacc.cli.doctor.findings", lambda: found)
    code, out, _ = said("doctor")
    assert code == 1
    remedy = "mip: pip install 'mip>=2.0'"
    assert out.endswith(f"\nTo fix:\n  {remedy}\nds_adacc cannot run here. Missing or not working: mip\n")
    assert said("doctor", "--json")[0] == 1


@pytest.mark.parametrize(("has_device", "remedy"), [(True, CUDA13), (False, "")])
def test_without_cupy_the_command_is_named_if_it_serves_a_device(without, monkeypatch, has_device, remedy):
    without(*checks.CUPY, module="cupy")
    monkeypatch.setattr(checks, "_has_cuda_device", lambda: has_device)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    found = by_name(checks.findings())
    assert found["CuPy"] == Finding("CuPy", False, False, "not installed", remedy)
    assert found["NVRTC"] == Finding("NVRTC", False, False, "not installed", remedy)
    assert all(finding.fine for finding in found.values() if finding.required)


def test_nvrtc_compiles_a_kernel(monkeypatch):
    cuda = pytest.importorskip("cupy.cuda")
    try:
        version = cuda.nvrtc.getVersion()
    except RuntimeError as error:
        pytest.skip(f"no NVRTC: {error}")
    monkeypatch.setattr(checks, "_has_cuda_device", lambda: False)
    assert checks._nvrtc() == f"{version[0]}.{version[1]}, compiles a kernel (-arch=sm_80)"


def test_two_cupys_are_too_many(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "14.2.0")
    with pytest.raises(Absent, match=r"cupy 14.2.0 and cupy-cuda12x 14.2.0 and cupy-cuda13x 14.2.0 are"):
        checks._cupy()


@pytest.mark.parametrize(("cuda", "extra"), [("12.9", "cuda12"), ("13.0", "cuda13"), (None, "cuda13")])
def test_the_extra_is_for_the_cuda_of_torch(cuda, extra, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", cuda)
    assert checks._cuda_extra() == extra


def test_a_requirement_that_is_not_installed_is_named_with_its_command(without):
    without("mip", module="mip")
    assert checks._requirement(Requirement("mip>=2.0")) == Finding(
        "mip", False, True, "not installed", "pip install 'mip>=2.0'"
    )


def test_without_the_solver_devices_and_the_cache_are_told_of_all_the_same():
    code = "import sys; sys.modules['mip'] = None\nimport torch\nfrom types import SimpleNamespace as Made\n"
    code += "from ds_adacc.cli import checks\ntorch.cuda.device_count = lambda: 1\n"
    code += "torch.cuda.is_available = lambda: True\n"
    code += "torch.cuda.get_device_properties = lambda index: Made(name='H200', total_memory=139 << 30)\n"
    code += "print(checks._cuda_devices(), checks._cache(), sep='\\n')"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert told.stdout.splitlines() == ["cuda:0 H200, 139.0 GiB", f"{default_path()}, 0.0 MiB, 0 profiles"], told.stderr


def test_a_requirement_that_is_too_old_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "1.9")
    told = checks._requirement(Requirement("mip>=2.0"))
    assert told == Finding("mip", False, True, "1.9, which is not >=2.0", "pip install --force-reinstall 'mip>=2.0'")


def test_a_requirement_that_cannot_be_imported_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "hjson", None)
    told = checks._requirement(Requirement("hjson"))
    assert (told.fine, told.required, told.remedy) == (False, True, "pip install --force-reinstall 'hjson'")
    assert told.detail.startswith("ModuleNotFoundError: ")


@pytest.mark.usefixtures("without_slow_checks")
def test_what_training_imports_is_imported(monkeypatch):
    """A new release of torch may have moved something, though it can be imported itself."""
    monkeypatch.setitem(sys.modules, "ds_adacc.engine.api", None)
    found = by_name(checks.findings())["ds_adacc"]
    assert (found.fine, found.required) == (False, True)
    assert found.detail.startswith("ModuleNotFoundError: ")


def test_all_that_setup_cfg_requires_is_looked_at():
    names = {requirement.name for requirement in checks._requirements()}
    assert names >= {"torch", "deepspeed", "mip", "numba", "pydantic", "rich"} and not names & {"pytest", "matplotlib"}


def test_an_old_python_is_found(monkeypatch):
    monkeypatch.setattr(checks.platform, "python_version", lambda: "3.9.1")
    with pytest.raises(Absent, match=r"3\.9\.1, which is not >=3\.10"):
        checks._python()


def test_a_backend_that_gives_other_bits_is_found(monkeypatch):
    from ds_adacc import kernels

    make = kernels.make_codec
    scale = {"reference": "extreme", "cpu": "paper"}
    monkeypatch.setattr(kernels, "make_codec", lambda *a, **k: make(*a, scale=scale[k["backend"]], **k))
    with pytest.raises(Absent, match="runs, but gives other bits than the reference"):
        checks._backend("cpu")


@pytest.mark.usefixtures("without_slow_checks")
@pytest.mark.parametrize(
    ("accelerator", "has_device", "required", "needed"),
    [
        (None, False, True, "DeepSpeed builds an operator with it, once, when training on the CPU begins"),
        ("cpu", True, True, "DeepSpeed builds an operator with it, once, when training on the CPU begins"),
        (None, True, False, "only for operators that DeepSpeed builds when they are first used, such as FusedAdam, "),
    ],
)
def test_the_compiler_is_required_where_deepspeed_builds_an_operator(
    monkeypatch, tmp_path, accelerator, has_device, required, needed
):
    monkeypatch.setattr(checks, "_has_cuda_device", lambda: has_device)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    if accelerator:
        monkeypatch.setenv("DS_ACCELERATOR", accelerator)
    compiler = tmp_path / "c++"
    compiler.touch(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    found = by_name(checks.findings())["C++ compiler"]
    assert (found.fine, found.required) == (True, required)
    assert found.detail.startswith(f"{compiler}: {needed}")
    monkeypatch.setenv("CXX", "c--")
    found = by_name(checks.findings())["C++ compiler"]
    assert (found.fine, found.required, found.remedy) == (False, required, "apt install g++")
    assert found.detail.startswith(f"c-- is not on the PATH: {needed}")


def test_a_solver_that_dies_is_a_finding(tmp_path, monkeypatch):
    """The plan of simple rules that stands in for it is no proof that it works."""
    dies = tmp_path / "python"
    dies.write_text(f"#!{sys.executable}\nimport os\nos.kill(os.getpid(), 11)\n")
    dies.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dies))
    detail = "the solver's process failed: it was ended by signal 11"
    assert checks.finding_of("CBC", checks._cbc, "mend it", required=True) == Finding(
        "CBC", False, True, detail, "mend it"
    )


def test_the_solver_is_asked_something_that_needs_a_search(monkeypatch):
    from ds_adacc import planner

    asked, solve_uniform = [], planner.solve_in_process
    monkeypatch.setattr(planner, "solve_in_process", lambda *a, **k: asked.append(solve_uniform(*a, **k)) or asked[0])
    assert re.fullmatch(r"solves a model in \d+\.\d{3} s", checks._cbc())
    assert asked[0].added_seconds == 2.0 and asked[0].proven_optimal


def test_a_file_in_place_of_the_cache_is_told_of_and_left_alone(document, monkeypatch):
    path = default_path()
    path.parent.mkdir()
    path.write_bytes(b"not a folder")
    finding = checks.finding_of("profile cache", checks._cache)
    remedy = "set XDG_CACHE_HOME to a folder that you may write to"
    told = f"NotADirectoryError: [Errno 20] Not a directory: '{path}'"
    assert finding == Finding("profile cache", False, False, told, remedy)
    monkeypatch.setattr("ds_adacc.cli.doctor.findings", lambda: [finding])
    code, told = document("doctor")
    assert (code, told["fine"], told["cache"]) == (0, True, None)
    assert path.read_bytes() == b"not a folder"


def test_a_cache_folder_that_links_to_nothing_is_told_of(cache):
    cache.symlink_to("/scratch/of/another/node")
    told = f"{cache} is a link to /scratch/of/another/node, which does not exist: no profile is kept, and no journal"
    remedy = "set XDG_CACHE_HOME to a folder that you may write to"
    assert checks.finding_of("profile cache", checks._cache) == Finding("profile cache", False, False, told, remedy)


def test_a_cache_folder_that_cannot_be_made_is_told_of(cache):
    cache.write_text("a file where the folder would be")
    told = f"{cache} cannot be written to: no profile is kept, and no journal"
    remedy = "set XDG_CACHE_HOME to a folder that you may write to"
    assert checks.finding_of("profile cache", checks._cache) == Finding("profile cache", False, False, told, remedy)
