"""Device names, threads and memory of both platforms, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vllm_omni.errors import ConfigError
from vllm_omni.platforms import Device, current_platform, platform_of
from vllm_omni.platforms.cpu import CpuPlatform
from vllm_omni.platforms.cuda import CudaPlatform


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> CudaPlatform:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices = tuple(Device(f"cuda:{i}", 1 << 37) for i in range(4))
    monkeypatch.setattr(CudaPlatform, "devices", lambda self: devices)
    return CudaPlatform()


def test_importing_the_package_is_free() -> None:
    code = "import sys, vllm_omni.platforms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_this_machine_is_a_cpu() -> None:
    assert current_platform().device_type == "cpu"
    assert platform_of("cpu").device_type == "cpu"


def test_the_cpu_is_one_device_with_the_host_s_memory() -> None:
    (device,) = CpuPlatform().devices()

    assert device.name == "cpu"
    assert 1 << 28 < device.memory_bytes <= 1 << 50


def test_replicas_share_the_cores_evenly_and_each_has_one() -> None:
    cores = len(os.sched_getaffinity(0))
    platform = CpuPlatform()

    assert platform.default_num_threads(1) == cores
    assert platform.default_num_threads(100 * cores) == 1
    assert platform.default_devices(3, 2) == ("cpu", "cpu")


def test_several_ranks_on_one_memory_node_are_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    platform = CpuPlatform()

    assert platform.child_env(("cpu",)) == {}
    assert platform.child_env(("cpu", "cpu")) == {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    assert platform.child_env(("cpu", "cpu")) == {}


def test_preparing_a_process_may_be_repeated() -> None:
    CpuPlatform().prepare_process()
    CpuPlatform().prepare_process()


def test_a_replica_sees_its_own_gpus_only(four_gpus: CudaPlatform) -> None:
    assert four_gpus.child_env(("cuda:2", "cuda:3")) == {"CUDA_VISIBLE_DEVICES": "2,3"}


def test_gpu_numbers_count_within_what_this_process_sees(
    four_gpus: CudaPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-abc")

    assert four_gpus.child_env(("cuda:1", "cuda:0")) == {"CUDA_VISIBLE_DEVICES": "GPU-abc,5"}
    with pytest.raises(ConfigError, match="cuda:2"):
        four_gpus.child_env(("cuda:2",))


@pytest.mark.parametrize("name", ["gpu:0", "cuda", "cuda:x", "cuda:-1"])
def test_a_device_of_another_name_is_refused(four_gpus: CudaPlatform, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        four_gpus.child_env((name,))


def test_replicas_are_spread_over_the_gpus_and_then_share(four_gpus: CudaPlatform) -> None:
    assert [four_gpus.default_devices(i, 1) for i in range(5)] == [
        ("cuda:0",),
        ("cuda:1",),
        ("cuda:2",),
        ("cuda:3",),
        ("cuda:0",),
    ]
    assert four_gpus.default_devices(1, 2) == ("cuda:2", "cuda:3")
    with pytest.raises(ConfigError, match="8 ranks"):
        four_gpus.default_devices(0, 8)
