"""Each field case of Slurm has a test: the list of which, and what holds it true."""

from __future__ import annotations

import ast
import json
from pathlib import Path

FIELD = "unit/test_slurm_field_cases.py::"
MORE = "unit/test_slurm_more_field_cases.py::"
BEHAVIOUR = "unit/test_slurm_case_behaviour.py::"
JOBS = "unit/test_slurm_jobs.py::"
CLIENT = "unit/test_slurm_client.py::"
ALLOCATION = "unit/test_slurm_allocation.py::"
MATRIX = "sandbox/test_streams_matrix.py::"
SIGNALS = "sandbox/test_slurm_signals.py::"
SCRIPT = MORE + "test_what_stands_in_the_script"
NODE_LISTS, BAD_LISTS, GRES = (
    FIELD + f"test_{n}" for n in ("node_lists", "bad_node_lists", "gres")
)

TESTED: dict[str, str] = {
    "cf-01": MORE + "test_cf_01_settings_are_asked_for",
    "cf-03": BEHAVIOUR + "test_cf_03_and_04_settings_come_from_the_daemon",
    "cf-04": BEHAVIOUR + "test_cf_03_and_04_settings_come_from_the_daemon",
    "cp-01": FIELD + "test_nobody_answered",
    "cp-02": MORE + "test_cp_02_no_accounting_is_an_error_and_not_a_silence",
    "cp-05": BEHAVIOUR + "test_cp_05_a_node_goes_by_its_node_name",
    "cp-07": BEHAVIOUR + "test_cp_07_triggers_that_every_release_knows",
    "en-01": MORE + "test_en_the_environment_of_a_surrounding_job_stays_out",
    "en-02": SCRIPT,
    "en-03": MORE + "test_en_the_environment_of_a_surrounding_job_stays_out",
    "en-05": SCRIPT,
    "fs-01": MORE + "test_fs_01_the_odd_signal_is_explained",
    "fs-03": BEHAVIOUR + "test_fs_03_workers_never_reach_for_a_hub",
    "gb-01": BEHAVIOUR + "test_gb_01_nothing_binds_a_task_to_one_gpu",
    "gb-02": BEHAVIOUR + "test_gb_02_and_03_gpus_by_uuid_and_what_is_visible",
    "gb-03": BEHAVIOUR + "test_gb_02_and_03_gpus_by_uuid_and_what_is_visible",
    **dict.fromkeys(("gr-01", "gr-02", "gr-04", "gr-05", "gr-06", "gr-07", "gr-09"), GRES),
    "gr-11": MORE + "test_gr_11_visible_devices_count_from_zero",
    "gr-12": FIELD + "test_rows_of_sinfo",
    "gr-13": SCRIPT,
    "gr-15": MORE + "test_gr_15_a_slash_gets_a_hint",
    "gr-17": MORE + "test_gr_17_shares_are_no_gpus",
    "id-01": FIELD + "test_ids",
    "id-02": FIELD + "test_ids",
    "id-03": FIELD + "test_ids",
    "id-06": FIELD + "test_variables_that_change_answers",
    "id-07": CLIENT + "test_names_cluster_and_environment",
    "id-08": MORE + "test_id_08_the_word_hetjob_stays_out_of_the_lines",
    "js-02": MORE + "test_js_02_a_list_of_states_and_an_infinite_limit",
    "js-03": MORE + "test_js_03_and_04_nodes_of_a_job",
    "js-04": MORE + "test_js_03_and_04_nodes_of_a_job",
    "js-05": MORE + "test_js_05_more_jobs_than_were_asked_for",
    "js-06": MORE + "test_js_06_drain_is_in_the_flags",
    "js-07": MORE + "test_js_07_status_200_with_errors",
    "js-10": MORE + "test_js_10_a_year_is_no_end",
    "mp-01": SCRIPT,
    "mp-02": BEHAVIOUR + "test_mp_02_no_launcher_of_deepspeed",
    "mp-03": CLIENT + "test_run_keeps_output_apart",
    "nd-01": SIGNALS + "test_a_node_is_lost_under_three_kinds_of_job",
    "nd-02": SIGNALS + "test_a_node_is_lost_under_three_kinds_of_job",
    "nd-03": SIGNALS + "test_a_node_is_lost_under_three_kinds_of_job",
    "nd-05": BEHAVIOUR + "test_nd_05_a_node_failure_without_requeue_is_an_end",
    "nd-07": "cluster/test_service_losses.py::test_a_killed_worker",
    "nd-08": SCRIPT,
    "nd-09": SIGNALS + "test_a_shrink_kills_without_a_word",
    "nd-11": SCRIPT,
    **dict.fromkeys(("nl-02", "nl-04", "nl-09", "nl-11", "nl-12", "nl-13"), NODE_LISTS),
    **dict.fromkeys(("nl-15", "nl-20", "nl-21"), NODE_LISTS),
    **dict.fromkeys(("nl-05", "nl-14", "nl-16", "nl-17", "nl-22"), BAD_LISTS),
    "nl-19": BEHAVIOUR + "test_nl_19_and_nw_09_components_by_their_own_variables",
    "nl-23": MORE + "test_nl_23_needs_no_scontrol",
    "nw-02": BEHAVIOUR + "test_nw_02_no_port_is_made_of_a_job_id",
    "nw-03": MORE + "test_nw_03_and_04_which_address",
    "nw-04": MORE + "test_nw_03_and_04_which_address",
    "nw-05": MORE + "test_nw_05_a_suffix_of_the_site",
    "nw-06": MORE + "test_nw_06_an_exact_interface",
    "nw-09": BEHAVIOUR + "test_nl_19_and_nw_09_components_by_their_own_variables",
    "pr-01": BEHAVIOUR + "test_pr_01_the_agents_are_a_step",
    "pr-02": MATRIX + "test_preemption_with_20_s",
    "pr-04": BEHAVIOUR + "test_pr_04_the_steps_are_signalled_and_not_the_shell",
    "pr-06": MATRIX + "test_preemption_without_grace",
    "pr-07": MORE + "test_pr_07_the_hint_depends_on_the_release",
    "pr-08": SIGNALS + "test_a_heterogeneous_job_has_one_fate",
    "pr-09": MORE + "test_pr_09_cancelled_by_root",
    "pr-10": BEHAVIOUR + "test_pr_10_a_state_is_never_read_from_an_exit_code",
    "pr-11": MORE + "test_pr_11_what_a_site_without_grace_gives",
    "pr-12": MORE + "test_pr_12_values_of_several_levels_are_merged",
    "pr-14": SCRIPT,
    "pr-16": BEHAVIOUR + "test_pr_16_and_19_the_task_is_the_program_itself",
    "pr-19": BEHAVIOUR + "test_pr_16_and_19_the_task_is_the_program_itself",
    "pr-20": SIGNALS + "test_srun_is_never_what_gets_the_signal",
    "pr-21": BEHAVIOUR + "test_pr_21_nothing_on_the_nodes_needs_slurm_s_commands",
    "pr-23": SCRIPT,
    "pr-26": SIGNALS + "test_signals_that_sound_like_an_end",
    "pr-27": SIGNALS + "test_signals_that_sound_like_an_end",
    "pr-28": SIGNALS + "test_a_requeue_tells_several_times",
    "st-01": FIELD + "test_node_states",
    "st-02": FIELD + "test_node_states",
    "st-03": FIELD + "test_node_states",
    "st-04": MORE + "test_st_04_draining_is_not_drained",
    "st-06": FIELD + "test_node_states",
    "st-08": BEHAVIOUR + "test_st_08_no_accounting_is_believed",
    "st-10": FIELD + "test_reasons",
    "st-11": SCRIPT,
    "tk-01": FIELD + "test_tasks_per_node",
    "tk-04": SCRIPT,
    "tk-05": BEHAVIOUR + "test_tk_05_as_many_tasks_as_nodes",
    "tk-06": BEHAVIOUR + "test_tk_06_a_job_is_known_by_its_id_and_not_by_its_name",
    "tm-02": FIELD + "test_times",
    "tm-03": MORE + "test_tm_03_and_07_no_limit",
    "tm-04": FIELD + "test_times",
    "tm-06": MORE + "test_tm_06_the_deadline_of_an_unlimited_job",
    "tm-07": MORE + "test_tm_03_and_07_no_limit",
}


def test_every_case_has_a_test(shared_dir: Path) -> None:
    """A case that is new in the folder fails here until it has one."""
    text = (shared_dir / "cases" / "slurm.json").read_text(encoding="utf-8")
    assert {case["id"] for case in json.loads(text)} == TESTED.keys()


def test_the_tests_that_are_named_are_there(root: Path) -> None:
    known: dict[str, set[str]] = {}
    for name in {place.partition("::")[0] for place in TESTED.values()}:
        tree = ast.parse((root / "tests" / name).read_text(encoding="utf-8"))
        found = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
        known[name] = {node.name for node in found}
    places = (place.partition("::") for place in TESTED.values())
    assert [f"{file}: {test}" for file, _, test in places if test not in known[file]] == []
