from __future__ import annotations

from pathlib import Path

import pytest

from tests.trio import GPUS, ONE_GPU, FakePlatform
from vllm_omni.config.deploy import ResolvedConfig
from vllm_omni.config.placement import split_devices
from vllm_omni.config.resolve import resolve
from vllm_omni.errors import PlacementError

CPU = FakePlatform()
NO_KV_SIZE = ("ears.kv_cache_memory_bytes=none", "mind.kv_cache_memory_bytes=none")


def placed(model_dir: Path, *overrides: str, platform: FakePlatform = CPU) -> ResolvedConfig:
    return resolve(model_dir, stage_overrides=overrides, platform=platform)


def fractions(config: ResolvedConfig) -> list[float | None]:
    return [stage.deploy.memory_fraction for stage in config.stages]


def refused(match: str):
    return pytest.raises(PlacementError, match=rf"^[^\n]*{match}[^\n]*$")


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("cpu", ("cpu",)),
        ("cuda:0", ("cuda:0",)),
        ("cuda:0,1", ("cuda:0", "cuda:1")),
        ("cuda:0,cuda:1", ("cuda:0", "cuda:1")),
    ],
)
def test_device_lists_are_split(text: str, devices: tuple[str, ...]):
    assert split_devices(text) == devices


def test_on_a_cpu_the_cores_are_shared_and_the_platform_is_named(model_dir: Path):
    config = placed(model_dir, "mouth.num_replicas=2")
    assert [stage.deploy.num_threads for stage in config.stages] == [4, 4, 4]
    assert config.stages[2].deploy.devices == ("cpu", "cpu")
    assert config.provenance["stages.mouth.devices"] == "platform (cpu)"
    assert config.provenance["stages.mouth.num_threads"] == "platform (cpu)"


def test_what_the_operator_decided_stays(model_dir: Path):
    config = placed(model_dir, "mind.num_threads=7", "mind.devices=cpu")
    assert config.stages[1].deploy.num_threads == 7
    assert config.provenance["stages.mind.num_threads"] == "--stage mind.num_threads"
    assert config.provenance["stages.mind.devices"] == "--stage mind.devices"


def test_fractions_beyond_one_are_refused_with_the_sum(model_dir: Path):
    with refused(r"on cpu: .*0\.8 \(mind\) \+ 0\.3 \(mouth\) = 1\.1, more than 1"):
        placed(model_dir, "mind.memory_fraction=0.8", "mouth.memory_fraction=0.3")


def test_every_replica_counts(model_dir: Path):
    with refused(r"0\.4 \(mouth\) \+ 0\.4 \(mouth\) \+ 0\.4 \(mouth\) = 1\.2"):
        placed(model_dir, "mouth.memory_fraction=0.4", "mouth.num_replicas=3")


def test_many_replicas_are_counted_in_one_short_line(model_dir: Path):
    with refused(r"\(mind\) \+ 400 times 0\.5 \(mouth\) = 200"):
        placed(model_dir, "mouth.memory_fraction=0.5", "mouth.num_replicas=400")


def test_one_flag_for_all_stages_of_a_device_is_added_up_too(model_dir: Path):
    with refused(r"cuda:0: 0\.8 \(ears\) \+ 0\.8 \(mind\) = 1\.6"):
        resolve(model_dir, cli={"gpu_memory_utilization": 0.8}, platform=ONE_GPU)


def test_a_cache_of_fixed_size_counts_by_its_size(model_dir: Path):
    with refused(r"0\.667 \(ears\) \+ 0\.6 \(mind\) = 1\.27"):
        placed(
            model_dir,
            "ears.kv_cache_memory_bytes=16g",
            "mind.memory_fraction=0.6",
            platform=FakePlatform(memory=(("cpu", 24_000_000_000),)),
        )


def test_one_is_allowed(model_dir: Path):
    config = placed(model_dir, "mind.memory_fraction=0.7", "mouth.memory_fraction=0.29")
    assert fractions(config) == [None, 0.7, 0.29]


def test_on_other_devices_the_same_fractions_fit(model_dir: Path):
    config = placed(
        model_dir,
        "mind.memory_fraction=0.8",
        "mouth.memory_fraction=0.3",
        "mind.devices=cuda:0",
        "mouth.devices=cuda:1",
        "ears.devices=cuda:1",
        platform=GPUS,
    )
    assert fractions(config) == [None, 0.8, 0.3]


def test_each_stage_of_a_gpu_gets_an_explicit_fraction(model_dir: Path):
    config = placed(model_dir, *NO_KV_SIZE, platform=ONE_GPU)
    assert fractions(config) == [0.4, 0.4, 0.1]
    assert config.stages[0].deploy.engine_args["gpu_memory_utilization"] == 0.4
    assert config.provenance["stages.ears.memory_fraction"] == "platform (cuda)"


def test_the_rest_is_divided_among_the_others(model_dir: Path):
    config = placed(model_dir, *NO_KV_SIZE, "mind.memory_fraction=0.4", platform=ONE_GPU)
    assert fractions(config) == [0.4, 0.4, 0.1]


def test_a_vllm_stage_never_takes_the_whole_cpu_by_default(model_dir: Path):
    config = placed(model_dir, *NO_KV_SIZE)
    assert fractions(config) == [0.25, 0.25, None]


def test_no_room_for_the_others_is_refused(model_dir: Path):
    with refused("which leaves too little for the other stages"):
        placed(model_dir, *NO_KV_SIZE, "mind.memory_fraction=0.9", platform=ONE_GPU)


def test_replicas_spread_over_the_gpus(model_dir: Path):
    config = placed(model_dir, "mind.num_replicas=2", platform=GPUS)
    assert [stage.deploy.devices for stage in config.stages] == [
        ("cuda:0",),
        ("cuda:1", "cuda:0"),
        ("cuda:1",),
    ]


def test_a_replica_of_two_ranks_takes_two_gpus(model_dir: Path):
    config = placed(model_dir, "mind.tensor_parallel_size=2", platform=GPUS)
    assert config.stages[1].deploy.devices == ("cuda:0,1",)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mouth.devices=cuda:7"], "stages.mouth.devices: no device 'cuda:7' here; found cuda:0"),
        (["mouth.devices=gpu"], "no device 'gpu' here"),
        (
            ["mind.devices=cpu"],
            "this build of vLLM runs on cuda, so stage 'mind' cannot run on cpu",
        ),
        (["mind.devices=cuda:0,1"], "2 devices for a replica of 1 ranks"),
        (["mind.devices=cuda:0", "mind.tensor_parallel_size=2"], "1 devices for a replica of 2"),
        (["mind.devices=cuda:0,0", "mind.tensor_parallel_size=2"], "a device repeats"),
        (
            ['mouth.devices=["cuda:0", "cuda:1"]'],
            "stages.mouth.devices has 2 entries for 1 replicas",
        ),
    ],
)
def test_impossible_devices_are_refused(model_dir: Path, overrides: list[str], message: str):
    with refused(message):
        placed(model_dir, *overrides, platform=GPUS)


def test_a_light_stage_may_stay_on_the_cpu_of_a_gpu_host(model_dir: Path):
    config = placed(model_dir, "mouth.devices=cpu", platform=ONE_GPU)
    assert config.stages[2].deploy.devices == ("cpu",)
    assert config.stages[2].deploy.memory_fraction is None


def test_a_gpu_is_no_device_of_a_cpu_host(model_dir: Path):
    with refused("no device 'cuda:0' here; found cpu"):
        placed(model_dir, "mouth.devices=cuda:0")


def test_a_one_shot_replica_has_one_device(model_dir: Path):
    with refused("stages.mouth.devices: a replica of 'mouth' has one device, not 2"):
        placed(model_dir, "mouth.devices=cuda:0,1", platform=GPUS)
