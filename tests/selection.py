"""Which tests `make quick`, `make test` and `make check` run, and what each group costs.

A test has one of four registers:

* quick: starts no training, and mostly needs no TensorFlow; or is one of ten cases of the contract
  under `mirrored`.
* test: the rest of the gate. A test that no table here names belongs to it.
* check: covers more combinations of what a cheaper test covers; or builds the documentation, runs
  notebooks, or takes minutes.
* long: further numbers of replicas and processes, more combinations of parameters, and long forms;
  marked at the test or in `LONG`.

`make quick` runs the first, `make test` the first two, `make check` the first three and `make
long` all. Keys are folders (with a final slash), files or functions below `tests/` or the root; the
most specific key applies. Values are costs in CPU seconds on an otherwise idle core.
`tests/conformance/selection.py` selects the cases of the contract.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

#: Fast tests, few of which import TensorFlow.
QUICK: dict[str, float] = {
    "tests/cluster/": 2,
    "tests/console/": 1,
    "tests/tools/doctor/test_command.py": 1,
    "tests/tools/doctor/test_processes.py": 0.3,
    "tests/tools/doctor/test_versions.py": 0.1,
    "tests/tools/install_horovod/": 1,
    "tests/cluster/launcher/test_manifests.py": 0.3,
    "tests/cluster/launcher/test_output.py": 0.7,
    "tests/cluster/launcher/test_plan.py": 6,
    "tests/cluster/launcher/test_restarts.py": 2.5,
    "tests/cluster/launcher/test_worker_pool.py": 4,
    "tests/pipelines/console/": 4,
    "tests/pipelines/reading/test_division.py": 1,
    "tests/pipelines/test_commands.py": 1,
    "tests/tools/plan/test_scaling.py": 1,
    "tests/run/test_catalogue.py": 0.1,
    "tests/run/test_flags.py": 5,
    "tests/script/test_processes.py::test_launcher_runs_plain_scripts_under_tfdist_script": 0.1,
    "tests/strategies/tensor_parallel/test_layout.py": 0.1,
    "tests/strategies/pipeline/test_bubble.py": 0.1,
    "tests/strategies/test_declaration.py": 1,
    "tests/test_config.py": 2.2,
    "tests/test_messages.py": 0.1,
    "tests/tools/test_init.py": 0.1,
    "tests/test_launch.py": 10,
    "tests/test_notebooks.py": 0.1,
    "tests/test_project_files.py": 0.2,
    "tests/test_import.py": 5,
    "tests/cluster/watchdog/": 0.5,
}

#: Tests of `make test` within folders and files that other tables name.
TEST: dict[str, float] = {"tests/processes/test_watchdog.py": 5.4}

#: Tests that run in `make check` but not in `make test`.
CHECK: dict[str, float] = {
    "notebooks/": 60,
    "tests/tools/bench/": 81,
    "tests/benchmarks/": 12,
    "tests/studies/faults/test_faults.py": 30,
    "tests/checkpoint/test_buckets.py": 35,
    "tests/checkpoint/test_resume.py::test_accumulated_gradients_are_restored": 15.1,
    "tests/checkpoint/test_resume.py::test_data_position_is_restored": 13.6,
    "tests/custom_step/test_models.py": 60,
    "tests/docs/test_code_blocks.py::test_blocks_run": 20,
    "tests/docs/test_docstrings.py::test_example_runs": 27,
    "tests/docs/test_docstrings.py::test_examples_run_in_a_new_process": 100,
    "tests/docs/test_site.py::test_site_builds_without_warnings": 15,
    "tests/examples/": 24,
    "tests/examples/test_unchanged_scripts.py": 40,
    "tests/studies/faults/": 10,
    "tests/gpu_paths/test_order_of_collectives.py::test_order_over_two_workers": 21.3,
    "tests/groups/test_process_groups.py": 15,
    "tests/horovod/test_callbacks.py": 36,
    "tests/cluster/launcher/test_plan.py::test_horovodrun_starts_workers": 5,
    "tests/loops/data_order/test_resume_position.py::test_resumes_at_any_position": 17.6,
    "tests/loops/test_prediction.py::"
    "test_grouped_convolution_predicts_before_and_after_training": 11,
    "tests/model_setup/test_create.py::test_continues_training_of_plain_keras": 6,
    "tests/model_setup/test_random_state.py::"
    "test_model_without_an_input_is_initialized_as_in_plain_keras": 8.3,
    "tests/model_setup/test_random_state.py::"
    "test_second_model_is_initialized_as_in_plain_keras": 12.4,
    "tests/models/": 25,
    "tests/pipelines/pack/test_pack.py::test_interrupt_keeps_finished_shards": 16.8,
    "tests/pipelines/reading/test_corrupt.py::test_changed_offsets_never_give_a_record_twice": 8.8,
    "tests/pipelines/reading/test_corrupt.py::"
    "test_compressed_shard_that_vanishes_ends_the_reading": 10.1,
    "tests/pipelines/reading/test_data_service.py": 24,
    "tests/pipelines/reading/test_mixture.py::test_sources_keep_their_order_and_resume": 9.6,
    "tests/pipelines/pack/test_ray.py": 15,
    "tests/processes/": 270,
    "tests/processes/test_watchdog.py::test_suspending_all_workers_ends_none": 17,
    "tests/processes/test_watchdog.py::test_orderly_exit_of_a_worker_ends_no_other": 8,
    "tests/programs/": 90,
    "tests/cluster/remote/": 35,
    "tests/recipes/test_data.py::test_backbone_is_trained_only_after_unfreezing": 6,
    "tests/recipes/test_digits.py::test_smoothed_and_mixed_labels_are_one_hot": 6,
    "tests/recipes/test_own_folders.py::test_plots_are_written_and_saved_weights_are_loaded": 10,
    "tests/recipes/test_two_steps.py": 78,
    "tests/run/test_bucket_folder.py": 22,
    "tests/run/test_determinism.py": 15,
    "tests/run/test_loggers.py::test_killed_run_has_each_step_once": 60,
    "tests/tools/replay/": 40,
    "tests/run/test_train_command.py::test_interrupt_saves_the_last_state": 15,
    "tests/strategies/test_strategies.py::test_model_loads_in_plain_keras_without_tfdist": 6,
    **{
        f"tests/script/test_processes.py::{test}": 25
        for test in (
            *("test_processes_agree_without_a_seed_and_print_once",),
            *("test_horovod_scripts_run_on_keras_3",),
            *("test_killed_script_resumes_within_its_second_fit",),
            *("test_custom_loops_stay_tensorflows",),
        )
    },
    "tests/patches/test_batch_norm.py::test_moving_statistics_average_all_replicas": 6,
    "tests/step/test_overflow.py::test_overflow_on_one_replica_skips_the_step_on_all": 10,
    "tests/patches/test_patches.py": 20,
    "tests/patches/test_random_layers.py": 25,
    "tests/patches/test_remat.py::test_remat_with_accumulation_and_mixed_precision": 17,
    "tests/strategies/parameter_server/test_strategy.py::test_model_behaves_like_keras": 10.3,
    "tests/strategies/parameter_server/test_strategy.py::"
    "test_schedules_count_the_updates_of_all_workers": 16.7,
    "tests/strategies/test_batches.py::test_last_batch_of_one_row_matches_one_device": 12,
    "tests/strategies/test_strategies.py::test_options_do_not_change_results": 11.3,
    "tests/strategies/tensor_parallel/test_tensor_parallel.py::"
    "test_matches_one_device_and_appears_complete": 14.5,
    "tests/test_import.py::test_imports_and_trains_without_what_is_only_on_linux_or_new": 20,
    "tests/test_import.py::test_finds_every_private_name_in_installed_packages": 6,
    "tests/test_compile_cache.py::test_later_process_loads_the_program": 15,
    "tests/test_devices.py::test_configuring_devices_before_building_the_model": 10,
    "tests/test_devices.py::test_script_that_names_its_devices_may_use_tensorflow_first": 5,
    "tests/test_devices.py::test_creates_logical_devices_in_a_new_process": 13,
    "tests/test_devices.py::test_memory_limit_without_gpus": 6,
    "tests/test_large_batches.py": 16,
    "tests/test_life_of_a_batch.py::test_fit_runs_known_files_only": 10,
    "tests/test_notebooks.py::test_cells_run": 43,
    "tests/test_properties.py": 26,
    "tests/test_project_files.py::test_example_prints_the_metrics_in_the_readme": 10,
    "tests/test_suggested_fixes.py::test_calling_init_before_tensorflow_connects_workers": 13,
    "tests/test_suggested_fixes.py::test_suggested_fix_trains": 13.8,
    "tests/upstream/test_adapters.py::test_backend_that_is_not_installed": 12,
    "tests/trainer/test_trainer.py::test_model_recompiled_between_fits_matches_keras": 10,
    "tests/trainer/test_data.py::test_ragged_tensors_train_as_in_keras": 8.4,
    "tests/trainer/test_data.py::test_sparse_tensors_train_as_in_keras": 9.1,
    "tests/trainer/test_refused.py::test_tensorflow_that_started_first_limits_the_devices": 8.9,
    "tests/trainer/test_files.py::test_interrupted_training_resumes": 9,
    "tests/trainer/test_model.py::test_model_behaves_like_keras_in_callbacks": 17.6,
    "tests/trainer/test_hub.py": 40,
    "tests/test_wheel.py": 10,
    "tests/tools/verify/": 34,
    "tests/cluster/watchdog/test_simulated.py::test_many_failures_are_one_verdict": 17,
}

#: Parameters of tests that run in `make check` but not in `make test`; the others of the same test
#: find most faults.
CHECK_PARAMETERS: dict[str, tuple[str, ...]] = {
    "tests/pipelines/check/test_check.py::test_each_record_is_read_once": ("1-0",),
    "tests/pipelines/reading/test_corrupt.py::test_record_is_named": ("0-0", "0-20", "40-9"),
    "tests/pipelines/reading/test_corrupt.py::test_records_are_skipped_and_counted": (
        *("0-9", "0-20", "40-0"),
    ),
    "tests/pipelines/reading/test_mixture.py::test_seed_follows_from_epoch_and_record": ("cached",),
    "tests/pipelines/reading/test_urls.py::test_order_equals_that_of_local_files": (
        *("s3-cached", "s3-little-memory"),
    ),
    "tests/recipes/test_own_folders.py::test_splits_of_the_folder_are_used": (
        *("val-files", "validation-files"),
    ),
    "tests/script/test_in_process.py::test_script_prints_the_numbers_of_one_device": ("sharded",),
    "tests/test_precision.py::test_every_policy_trains_and_leaves_the_global_one": (
        *("mixed_bfloat16",),
    ),
    "tests/trainer/test_data.py::test_evaluate_returns_what_keras_does": ("None",),
    "tests/trainer/test_data.py::test_fewer_rows_than_replicas": ("mirrored-3",),
    "tests/trainer/test_data.py::test_several_inputs_without_labels": ("tuple",),
    "tests/trainer/test_files.py::test_model_checkpoint_saves_the_best_epoch_of_keras": (
        *(".weights.h5",),
    ),
    "tests/trainer/test_files.py::test_tensorboard": ("2",),
    "tests/trainer/test_model.py::test_nothing_stays_patched": ("one_device", "sharded"),
}

#: Parameters of tests that only `make long` runs; the others of the same test find most faults.
LONG: dict[str, tuple[str, ...]] = {
    "tests/script/test_processes.py::test_horovod_scripts_run_on_keras_3": ("horovod_tape",),
    "tests/checkpoint/test_resume.py::test_resumed_training_is_bitwise_identical": (
        "one_device-train 6",
        "mirrored-test 4",
    ),
    "tests/custom_step/test_steps.py::test_matches_one_device": (
        *("of-gradients", "sum", "sync-batch-norm-sum"),
    ),
    "tests/gpu_paths/test_kernel_coverage.py::test_every_operation_of_a_replica_has_a_gpu_kernel": (
        *("mirrored, hierarchical copy-images-plain", "pipeline-images-plain"),
    ),
    "tests/horovod/test_optimizer.py::test_equals_one_device_with_the_global_batch": (
        *("adam", "loop", "embedding as dense", "passes averaged", "sum"),
        *("loss scale", "loss scale in a loop", "fp16"),
    ),
    "tests/loops/test_full_batch_mode.py::test_equals_one_device": ("overwritten", "merged graphs"),
    "tests/loops/test_prediction.py::test_grouped_convolution_predicts_before_and_after_training": (
        "sharded",
        "central_storage",
    ),
    "tests/model_setup/test_random_state.py::test_second_model_is_initialized_as_in_plain_keras": (
        *("model-one_device", "function-one_device", "model-sharded"),
    ),
    "tests/pipelines/reading/test_urls.py::test_order_equals_that_of_local_files": (
        *("memory-in-order", "memory-little-memory", "memory-resumed", "memory-cached"),
        *("s3-one-of-three", "s3-in-order"),
    ),
    "tests/pipelines/reading/test_urls.py::"
    "test_compressed_remote_shards_are_read_in_the_local_order": (
        *("memory-ZLIB", "memory-GZIP", "s3-ZLIB"),
    ),
    # These decisions are exchanged by the same calls under Horovod.
    **{
        f"tests/processes/test_agreement.py::{test}": ("multi_worker",)
        for test in (
            *("test_learning_rate_comes_from_rank_0", "test_initial_weights_come_from_rank_0"),
            "test_model_behaves_like_keras_on_every_worker",
            "test_chief_callbacks_write_once_and_restore_on_all_ranks",
            "test_chief_changing_the_model_within_an_epoch_raises",
        )
    },
    "tests/processes/test_saving.py::test_single_worker_matches_one_device": ("processes",),
    "tests/recipes/test_own_folders.py::test_splits_of_the_folder_are_used": (
        *("val-packed", "test-packed"),
    ),
    "tests/patches/test_batch_norm.py::test_moving_statistics_average_all_replicas": (
        *("mirrored-2", "central_storage-3", "towers-3"),
    ),
    "tests/patches/test_batch_norm.py::test_validation_evaluation_and_saved_model_agree": (
        *("central_storage", "towers"),
    ),
    "tests/step/test_overflow.py::test_overflow_on_one_replica_skips_the_step_on_all": (
        *("one_device-0", "one_device-7", "central_storage-0", "central_storage-7", "towers-0"),
    ),
    "tests/patches/test_random_layers.py::test_replicas_draw_the_rows_of_one_device": (
        *("gaussian_noise-central_storage", "gaussian_noise-towers"),
        *("gaussian_dropout-central_storage", "gaussian_dropout-towers"),
    ),
    **{
        f"tests/patches/test_random_layers.py::{test}": ("central_storage", "towers")
        for test in (
            *("test_same_seed_draws_the_same_numbers", "test_each_step_draws_new_numbers"),
            *("test_seed_state_matches_one_device", "test_evaluation_draws_nothing"),
        )
    },
    "tests/test_devices.py::test_creates_logical_devices_in_a_new_process": (
        *("resolve(None, 2)-2",),
    ),
    "tests/test_large_batches.py::test_growing_batches_match_gradient_descent": (
        *("one_device-1", "central_storage-2"),
    ),
    "tests/test_precision.py::test_every_policy_trains_and_leaves_the_global_one": (
        *("float16", "bfloat16", "float32"),
    ),
    "tests/trainer/test_trainer.py::test_model_recompiled_between_fits_matches_keras": (
        *("one_device-1", "central_storage-2"),
    ),
    "tests/trainer/test_trainer.py::test_run_eagerly_calls_layers_eagerly": (
        "central_storage-2",
        "towers-2",
    ),
    "tests/trainer/test_trainer.py::test_second_trainer_in_a_process": (
        "central_storage-2",
        "towers-2",
    ),
    "tests/trainer/test_callbacks.py::test_averaged_weights_are_swapped_in": ("True",),
    "tests/trainer/test_callbacks.py::test_callback_trains_as_in_keras": (
        *("ReduceLROnPlateau", "Lambda", "clone", "freeze"),
    ),
    "tests/trainer/test_data.py::test_probing_the_first_batch_does_not_consume_it": (
        *("unknown length", "PyDataset with workers"),
    ),
    "tests/trainer/test_data.py::test_ragged_tensors_train_as_in_keras": (
        *("one_device-1", "central_storage-2"),
    ),
    "tests/trainer/test_data.py::test_sparse_tensors_train_as_in_keras": (
        *("one_device-1", "central_storage-2"),
    ),
    "tests/trainer/test_model.py::test_model_behaves_like_keras_in_callbacks": (
        *("one_device-1", "central_storage-2"),
    ),
}

#: The register of every key.
REGISTERS = {
    **dict.fromkeys(QUICK, "quick"),
    **dict.fromkeys(TEST, "test"),
    **dict.fromkeys(CHECK, "check"),
    **{f"{test}[{name}]": "check" for test, names in CHECK_PARAMETERS.items() for name in names},
    **{f"{test}[{name}]": "long" for test, names in LONG.items() for name in names},
}
_MARKED_IN_PLACE = ("quick", "check", "long")


def mark_of(item: pytest.Item) -> pytest.MarkDecorator | None:
    """Returns the mark that the tables give to a test; None if it has a mark already."""
    if any(item.get_closest_marker(name) for name in _MARKED_IN_PLACE):
        return None
    for place in _places(item.nodeid):
        if (register := REGISTERS.get(place)) is not None:
            return None if register == "test" else getattr(pytest.mark, register)
    return None


def may_be_quick(file: Path) -> bool:
    """Returns whether a file may contain quick tests, judging by its path."""
    path = file.relative_to(ROOT).as_posix()
    if file.name == "conftest.py" or path == _QUICK_CASES:
        return True
    return any(key.partition("::")[0] == path or path.startswith(key) for key in QUICK)


#: `tests/conformance/selection.py` marks its quick cases.
_QUICK_CASES = "tests/conformance/test_conformance.py"


def _places(nodeid: str) -> Iterator[str]:
    """Yields a test's id, function, file and folders, the most specific first."""
    yield nodeid
    function = nodeid.partition("[")[0]
    yield function
    file = function.partition("::")[0]
    yield file
    for folder in Path(file).parents:
        yield f"{folder.as_posix()}/"
