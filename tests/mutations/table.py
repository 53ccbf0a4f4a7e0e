"""The mutations: what is taken away, and the test that fails for want of it."""

from dataclasses import dataclass

_DELAYED = "step/delayed_overlap.py"
_DEVICE = "io/device_link.py"
_REST = "unit/fsdp/test_backward_and_forward.py"
_DEVICE_FEED = "step/device_feed.py"
_HOST_WEIGHT = "step/host_weight.py"
_UPDATER = "step/device_updater.py"
_FEED = "step/gradient_feed.py"
_LINK_FEED = "step/link_feed.py"
_SIDES = "step/gradient_feed.py"
_COPIES = "io/device_link.py"
_QUEUE = "fsdp/gradient_offload.py"
_H2D = "fsdp/h2d_prefetch.py"
_SAVED = "activations/pool.py"
_BLOCKS = "activations/host_blocks.py"
_STREAM = "fsdp/weight_stream.py"

_DELAY = "unit/step/test_delayed_overlap.py"
_ACTIVATIONS = "gpu/test_gpu_activations.py"
_READ = "gpu/test_gpu_read_only.py"
_WAITS = "gpu/test_waits.py"
_LINK = "gpu/test_gpu_link.py"
_COUNTS = "gpu/test_counts.py"
_PINNED = "gpu/test_gpu_pinned.py"
_RATES = "gpu/test_gpu_calibration.py"
_CLOCK = "gpu/test_gpu_recording.py::test_copies_are_timed_by_the_clock_of_the_device"
_ASKS = (
    "gpu/test_two_threads.py"
    "::test_a_stream_that_asks_is_behind_new_weights_whoever_read_them_before"
)
_SCHEDULES = "gpu/test_schedules.py"
_BESIDE = f"{_SCHEDULES}::test_what_goes_beside_a_unit_is_over_while_the_unit_is_held_up"
_COMPUTES = f"{_SCHEDULES}::test_backward_computes_while_gradients_are_held_up"
_BOTH_WAYS = f"{_SCHEDULES}::test_states_go_up_while_others_come_down"
_STEPS = f"{_WAITS}::test_steps_whose_gradients_are_late"
_BUSY = f"{_WAITS}::test_backward_returns_while_the_device_is_busy"
_OFFLOAD = f"{_WAITS}::test_gradients_of_a_stowed_model_that_are_late"
_SUMS = f"{_WAITS}::test_gradients_of_later_micro_batches_that_are_late"


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change of the source, after which ``test`` fails."""

    path: str
    """Within src/tensorstow."""
    code: str
    """There once in the file."""
    instead: str
    test: str
    """Within tests."""


MUTATIONS = (
    # --- updates that are delayed by one step, not by none ---
    Mutation(
        _DELAYED,
        "schedule.begin_passes()",
        "schedule.apply_early()",
        f"{_DELAY}::test_gradients_are_used_one_step_late",
    ),
    Mutation(
        _DELAYED,
        "step <= self._warmup_steps",
        "step < self._warmup_steps",
        f"{_DELAY}::test_gradients_are_used_one_step_late",
    ),
    Mutation(
        _DELAYED,
        "if plan.commits or step",
        "if step",
        f"{_DELAY}::test_a_resumed_run_has_the_bits_of_the_whole_one",
    ),
    Mutation(
        _DELAYED,
        "self._hooks.append(saving(self._before_state_dict))",
        "pass",
        f"{_DELAY}::test_a_state_dict_is_of_one_moment",
    ),
    Mutation(
        _DELAYED,
        "        if schedule is not None:\n            schedule.wait()\n",
        "",
        f"{_DELAY}::test_a_state_dict_is_of_one_moment",
    ),
    Mutation(
        _DELAYED,
        "self._early_steps += bool(self._under_way)\n            self.wait()",
        "self._early_steps += bool(self._under_way)",
        f"{_DELAY}::test_whatever_needs_the_weights_applies_the_update",
    ),
    Mutation(
        _DELAYED,
        "self._params.update_router.step_path.wait()",
        "pass",
        f"{_DELAY}::test_an_update_that_is_slow_is_waited_for",
    ),
    Mutation(
        _DELAYED,
        "self._params.update_router.step_path.join()",
        "pass",
        _ASKS,
    ),
    Mutation(
        "step/schedule.py",
        "self.wait()  # updates may still read them",
        "pass",
        "unit/step/test_schedule.py::test_gradients_are_zeroed_after_the_update_that_reads_them",
    ),
    Mutation(
        _DELAYED,
        "plan.uploads = False",
        "pass",
        f"{_DELAY}::test_weights_stay_as_they_are_until_the_next_step",
    ),
    Mutation(
        _DELAYED,
        "if self._trainer is not None and self._may_be_in_a_pass():",
        "if False:",
        f"{_DELAY}::test_the_update_is_not_applied_beside_a_forward_or_backward",
    ),
    Mutation(
        "optim/step_runner.py",
        "with self._schedule.stepping():",
        "with suppress() if overflowed else self._schedule.stepping():",
        f"{_DELAY}::test_a_scaled_loss_and_a_skipped_step",
    ),
    Mutation(
        "step/schedule.py",
        "        if self.waits_before_step:\n            self.wait()\n",
        "",
        f"{_DELAY}::test_a_scaled_loss_and_a_skipped_step",
    ),
    Mutation(
        "step/deferred_rows.py",
        "            self.wait()\n            self._forget()",
        "            self._forget()",
        "unit/step/test_deferred_rows.py::test_the_last_rows_catch_up_at_the_end",
    ),
    # --- norms of gradients that are used at once ---
    Mutation(
        _COPIES,
        "and self._copies[0][1].query():",
        ":",
        "unit/step/test_norms.py::test_a_gradient_that_is_copied_is_not_read_before",
    ),
    Mutation(
        _COPIES,
        "copied.synchronize()",
        "pass",
        "unit/step/test_norms.py::test_a_gradient_that_is_copied_is_not_read_before",
    ),
    # --- weights of a model that is only read ---
    Mutation(
        "io/files.py",
        "            transfer.wait()",
        "            pass",
        "unit/memory/test_moving_bytes.py::test_memory_is_left_when_no_transfer_uses_it",
    ),
    Mutation(
        _DEVICE,
        "self.last_use: DeviceEvent = link.record_event()",
        "self.last_use: DeviceEvent = torch.Event(link.device)",
        f"{_READ}::test_a_new_buffer_is_filled_behind_the_last_use_of_its_memory",
    ),
    Mutation(
        _STREAM,
        "self.link.join(unit.copied)",
        "pass",
        f"{_READ}::test_a_unit_is_computed_with_behind_its_copy",
    ),
    Mutation(
        _STREAM,
        "buffer.last_use = self.link.record_event()",
        "pass",
        f"{_READ}::test_a_buffer_is_filled_behind_its_last_use",
    ),
    Mutation(
        _STREAM,
        "self.last_copy is None or self.last_copy.query()",
        "True",
        f"{_READ}::test_host_memory_is_read_into_behind_its_copy",
    ),
    Mutation(
        _STREAM,
        "unit.wait()",
        "pass",
        f"{_READ}::test_who_waits_sleeps[read]",
    ),
    Mutation(
        _STREAM,
        "unit.last_copy.synchronize()",
        "pass",
        f"{_READ}::test_who_waits_sleeps[copy]",
    ),
    Mutation(
        _STREAM,
        "return PinnedBlock(nbytes, self.link.device, self.link.synchronize)",
        "return Arena(nbytes, in_children=False)",
        f"{_READ}::test_weights_go_up_from_pinned_memory[disk]",
    ),
    Mutation(
        "fsdp/read_sources.py",
        "memory = PinnedBlock(round_up(layout.nbytes, PAGE), link.device, link.synchronize)",
        'memory = PinnedBlock(round_up(layout.nbytes, PAGE), torch.device("cpu"), lambda: None)',
        f"{_READ}::test_weights_go_up_from_pinned_memory[host]",
    ),
    # --- the log of copies ---
    Mutation("io/transfer_log.py", "self._zero.synchronize()", "pass", _CLOCK),
    Mutation("io/transfer_log.py", "ended.synchronize()", "pass", _CLOCK),
    # --- the link ---
    Mutation(
        _DEVICE,
        "return torch.accelerator.current_stream(self.device).record_event()",
        "return torch.Event(self.device)",
        f"{_WAITS}::test_a_copy_down_waits_for_what_makes_its_source",
    ),
    Mutation(
        _DEVICE,
        "self._d2h_stream.wait_event(_torch_event(event))",
        "_torch_event(event)",
        f"{_WAITS}::test_a_copy_down_waits_for_what_makes_its_source",
    ),
    Mutation(
        _DEVICE,
        "return self._d2h_stream.record_event()",
        "return torch.Event(self.device)",
        f"{_WAITS}::test_a_copy_down_waits_for_what_makes_its_source",
    ),
    Mutation(
        _DEVICE,
        "self._h2d_stream.wait_event(_torch_event(event))",
        "_torch_event(event)",
        f"{_WAITS}::test_a_copy_up_waits_for_what_reads_its_target",
    ),
    Mutation(
        _DEVICE,
        "to.record_stream(self._h2d_stream)",
        "pass",
        f"{_WAITS}::test_memory_that_is_freed_behind_a_copy_up_is_not_given_to_others",
    ),
    Mutation(
        _DEVICE,
        "return self._h2d_stream.record_event()",
        "return torch.Event(self.device)",
        f"{_WAITS}::test_a_copy_up_waits_for_what_reads_its_target",
    ),
    Mutation(
        _DEVICE,
        "torch.accelerator.current_stream(self.device).wait_event(_torch_event(event))",
        "_torch_event(event)",
        f"{_WAITS}::test_a_copy_up_waits_for_what_reads_its_target",
    ),
    Mutation(
        _DEVICE,
        "            link.synchronize()\n",
        "            pass\n",
        f"{_WAITS}::test_nothing_is_under_way_on_a_settled_link[second link]",
    ),
    Mutation(
        _DEVICE,
        "self._update_stream.synchronize()",
        "pass",
        f"{_WAITS}::test_nothing_is_under_way_on_a_settled_link[update]",
    ),
    Mutation(
        _DEVICE,
        "self._d2h_stream.synchronize()",
        "pass",
        f"{_WAITS}::test_nothing_is_under_way_on_a_settled_link[down]",
    ),
    Mutation(
        _DEVICE,
        "self._h2d_stream.synchronize()",
        "pass",
        f"{_WAITS}::test_nothing_is_under_way_on_a_settled_link[up]",
    ),
    Mutation(
        _DEVICE,
        "to.copy_(source, non_blocking=True)",
        "to.copy_(source)",
        f"{_WAITS}::test_nothing_is_under_way_on_a_settled_link",
    ),
    Mutation(
        _DEVICE,
        "    with stream:\n",
        "    if stream:\n",
        f"{_WAITS}::test_copies_run_beside_the_caller_s_stream",
    ),
    # --- host_weights ---
    Mutation(
        _HOST_WEIGHT,
        "link.d2h(pairs, [link.record_event()]).synchronize()",
        "link.d2h(pairs, []).synchronize()",
        f"{_WAITS}::test_a_weight_that_is_still_to_be_written_is_fetched_as_it_will_be",
    ),
    Mutation(
        _HOST_WEIGHT,
        "link.d2h(pairs, [link.record_event()]).synchronize()",
        "link.d2h(pairs, [link.record_event()])",
        f"{_WAITS}::test_what_is_written_late_between_backward_and_step_is_seen",
    ),
    Mutation(
        _HOST_WEIGHT,
        "link.join(link.h2d(pairs, [link.record_event()]))",
        "link.join(link.h2d(pairs, []))",
        f"{_WAITS}::test_a_weight_is_uploaded_behind_its_readers",
    ),
    Mutation(
        _HOST_WEIGHT,
        "link.join(link.h2d(pairs, [link.record_event()]))",
        "link.h2d(pairs, [link.record_event()])",
        f"{_WAITS}::test_a_weight_is_uploaded_before_whatever_comes_next",
    ),
    # --- gradients down and weights up, by chunk ---
    Mutation(
        _DEVICE_FEED,
        "self.link.record_event().synchronize()  # the last step's copies",
        "pass  # the last step's copies",
        f"{_WAITS}::test_a_step_by_gradients_that_are_in_host_memory_already",
    ),
    Mutation(_DEVICE_FEED, "self.link.join(copied)", "pass", _STEPS),
    *(
        Mutation(_COPIES, "and self._copies[0][1].query():", ":", test)
        for test in (_STEPS, f"{_STEPS}[none-device-bf16]", f"{_OFFLOAD}[host-backward]")
    ),
    *(
        Mutation(_COPIES, "copied.synchronize()", "pass", test)
        for test in (
            f"{_COUNTS}::test_a_forward_waits_for_gradients_that_are_late_and_for_nothing_else",
            f"{_STEPS}[none-device-bf16]",
            f"{_OFFLOAD}[host-backward]",
        )
    ),
    Mutation(
        _DEVICE_FEED, "self.link.d2h(pairs, events.values())", "self.link.d2h(pairs, ())", _STEPS
    ),
    *(
        Mutation(
            _LINK_FEED,
            "computed = self.link.record_event() if updates else None",
            "computed = torch.Event(self.link.device)",
            f"{_STEPS}[none-{side}-bf16]",
        )
        for side in ("host", "device")
    ),
    *(
        Mutation(
            _LINK_FEED,
            "else self.link.record_event()\n        self._hold",
            "else torch.Event(gradient.device)\n        self._hold",
            f"{_STEPS}[backward-{side}-bf16]",
        )
        for side in ("host", "device")
    ),
    # --- states up and down, by chunk ---
    Mutation(
        _UPDATER,
        "self._made = self.link.record_event()",
        "self._made = torch.Event(link.device)",
        f"{_WAITS}::test_slots_on_the_device_are_made_of_memory_that_is_in_use_still",
    ),
    Mutation(_UPDATER, "self.link.join(computed)", "pass", f"{_STEPS}[none-device-bf16]"),
    Mutation(
        _UPDATER,
        "with self.link.update_stream():",
        "if self.link.update_stream():",
        f"{_WAITS}::test_backward_goes_on_while_states_go_up",
    ),
    Mutation(
        _UPDATER,
        "self.tables = PinnedBlock(\n            len(self._slots) * self._table_room, link.device,",
        "self.tables = PinnedBlock(\n            len(self._slots) * self._table_room,"
        ' torch.device("cpu"),',
        f"{_COUNTS}::test_a_rule_s_tables_hold_no_backward_up",
    ),
    Mutation(
        _UPDATER,
        "self.link.join(self.link.h2d(h2d_pairs, [self._made]))",
        "self.link.h2d(h2d_pairs, [self._made])",
        f"{_STEPS}[none-device-bf16]",
    ),
    Mutation(
        _UPDATER,
        "self.link.d2h(d2h_pairs, [self.link.record_event()])",
        "self.link.d2h(d2h_pairs, [])",
        f"{_STEPS}[none-device-bf16]",
    ),
    Mutation(
        _FEED,
        "already\n                    feed.synchronize()",
        "already\n                    pass",
        f"{_WAITS}::test_nothing_is_under_way_when_an_update_on_the_device_has_failed",
    ),
    Mutation(
        _LINK_FEED,
        "self.link.synchronize()",
        "pass",
        f"{_WAITS}::test_nothing_is_under_way_when_an_update_on_the_device_has_failed",
    ),
    Mutation(
        _LINK_FEED,
        "self.link.record_event().synchronize()",
        "pass",
        f"{_WAITS}::test_what_makes_gradients_is_not_measured",
    ),
    Mutation(
        "step/schedule.py",
        "path.wait()",
        "pass",
        "gpu/test_gpu_speculation.py::test_a_clipped_step_is_over_when_step_returns",
    ),
    Mutation(
        _FEED,
        "feed.synchronize()\n            self._pipeline.undo",
        "pass\n            self._pipeline.undo",
        "gpu/test_gpu_speculation.py::test_weights_on_the_device_are_those_of_before",
    ),
    Mutation(
        "step/update_router.py",
        "self._links.weights.synchronize()\n",
        "pass\n",
        f"{_WAITS}::test_nothing_is_under_way_of_a_step_that_was_given_up",
    ),
    Mutation(
        "step/backward_overlap.py",
        "copied.synchronize()\n            copied = None",
        "copied = None",
        "unit/step/test_backward_overlap.py::test_a_gradient_of_another_order_is_waited_for",
    ),
    Mutation(
        "step/backward_overlap.py",
        "copied.synchronize()  # copies of the weight",
        "pass  # copies of the weight",
        "gpu/test_waits.py::test_gradients_of_a_stowed_model_that_are_late[host-backward-True]",
    ),
    # --- gradients of a stowed model ---
    Mutation(_QUEUE, "        self.synchronize()\n", "        self.query()\n", _OFFLOAD),
    Mutation(
        _QUEUE,
        "ready = self._link.record_event()",
        "ready = torch.Event(self._link.device)",
        _OFFLOAD,
    ),
    Mutation(
        _QUEUE,
        "gradient.reshape(-1), self._link.record_event()",
        "gradient.reshape(-1), torch.Event(self._link.device)",
        _SUMS,
    ),
    Mutation(
        _QUEUE,
        "while self._in_flight and self._in_flight[0].complete.query():",
        "while self._in_flight:",
        _SUMS,
    ),
    Mutation(
        _QUEUE,
        "first.complete.synchronize()",
        "pass",
        f"{_COUNTS}::test_backward_waits_where_the_device_holds_too_many_gradients",
    ),
    Mutation(
        "tensors/dtensor.py",
        "if isinstance(local, OffloadedGradient) and not local.host.query():",
        "if gradient is None:",
        _BUSY,
    ),
    # --- weights of a stowed model ---
    Mutation(
        _H2D,
        "self.link.join(copied.complete)",
        "pass",
        f"{_WAITS}::test_what_is_gathered_has_gone_up_before[False]",
    ),
    Mutation(
        _H2D,
        "weight.record_stream(torch.accelerator.current_stream(self.link.device))",
        "pass",
        f"{_WAITS}::test_what_is_gathered_on_another_stream_outlives_its_buffer",
    ),
    Mutation(
        _H2D,
        "self._last_copy.synchronize()",
        "pass",
        f"{_WAITS}::test_host_memory_that_is_uploaded_changes_behind_that",
    ),
    Mutation(
        _H2D,
        "return first is None or first.query()",
        "return True",
        f"{_WAITS}::test_nothing_is_waited_for_to_go_ahead",
    ),
    Mutation(
        _H2D,
        "if copied.gathered:\n            copied.buffer.last_use = self.link.record_event()",
        "if copied.gathered:\n            copied.buffer.last_use = torch.Event(self.link.device)",
        f"{_WAITS}::test_what_is_gathered_has_gone_up_before[False]",
    ),
    Mutation(
        _H2D,
        "self.buffer.last_use = link.record_event()\n        self.gathered.clear()",
        "self.gathered.clear()",
        f"{_WAITS}::test_a_copy_that_was_kept_gives_way_behind_its_reader",
    ),
    Mutation(
        _H2D,
        "staging.copied.synchronize()",
        "pass",
        f"{_WAITS}::test_what_is_gathered_has_gone_up_before[True]",
    ),
    Mutation(
        _DEVICE,
        "self.last_use: DeviceEvent = link.record_event()",
        "self.last_use: DeviceEvent = torch.Event(link.device)",
        f"{_WAITS}::test_buffers_are_made_of_memory_that_is_in_use_still",
    ),
    # --- what is pinned ---
    Mutation(
        "fsdp/sharding.py",
        "PinnedBlock(nbytes, link.device, link.synchronize)",
        'PinnedBlock(nbytes, torch.device("cpu"), link.synchronize)',
        f"{_PINNED}::test_what_is_pinned_is_registered_to_the_byte",
    ),
    Mutation(
        "fsdp/gradient_offload.py",
        "PinnedBlock(sum(sizes), link.device, link.synchronize)",
        'PinnedBlock(sum(sizes), torch.device("cpu"), link.synchronize)',
        f"{_COUNTS}::test_forward_and_backward_of_a_stowed_model_do_not_wait_for_the_device",
    ),
    Mutation(
        "fsdp/gradient_offload.py",
        "PinnedBlock(like.nbytes, self._link.device, self._link.synchronize)",
        'PinnedBlock(like.nbytes, torch.device("cpu"), self._link.synchronize)',
        f"{_COUNTS}::test_forward_and_backward_of_a_stowed_model_do_not_wait_for_the_device",
    ),
    Mutation(
        _QUEUE,
        "PinnedBlock(\n                PIECE_BUFFERS * PIECE_BYTES, self._link.device,",
        'PinnedBlock(\n                PIECE_BUFFERS * PIECE_BYTES, torch.device("cpu"),',
        f"{_COUNTS}::test_forward_and_backward_of_a_stowed_model_do_not_wait_for_the_device",
    ),
    Mutation(
        "fsdp/h2d_prefetch.py",
        "PinnedBlock(count * staged, device, self.link.synchronize)",
        'PinnedBlock(count * staged, torch.device("cpu"), self.link.synchronize)',
        f"{_WAITS}::test_nothing_is_waited_for_to_go_ahead",
    ),
    Mutation(
        _DEVICE_FEED,
        "PinnedBlock(self.plan.nbytes, link.device, link.synchronize)",
        'PinnedBlock(self.plan.nbytes, torch.device("cpu"), link.synchronize)',
        f"{_COUNTS}::test_forward_and_backward_do_not_wait_for_the_device",
    ),
    Mutation(
        _HOST_WEIGHT,
        "PinnedBlock(host_weight_bytes(parameters), device, link.synchronize)",
        'PinnedBlock(host_weight_bytes(parameters), torch.device("cpu"), link.synchronize)',
        f"{_COUNTS}::test_a_forward_waits_for_gradients_that_are_late_and_for_nothing_else",
    ),
    Mutation(
        "step/optimizer_links.py",
        "PinnedBlock(nbytes, self.weights.device, self.weights.synchronize)",
        'PinnedBlock(nbytes, torch.device("cpu"), self.weights.synchronize)',
        "gpu/test_gpu_updates.py::test_states_go_up_while_others_come_down",
    ),
    # --- the host's own ---
    Mutation(
        "io/pinned.py",
        "        synchronize()\n",
        "        pass\n",
        "unit/io/test_pinned.py::test_memory_is_registered_once_and_let_go_when_copies_are_over",
    ),
    Mutation(
        "io/pinned.py",
        'device="cpu", pin_memory=True)',
        'device="cpu")',
        f"{_LINK}::test_torch_pins_where_nothing_registers_memory",
    ),
    # --- rates ---
    Mutation(
        "measure/calibration.py",
        "ready = [link.record_event()]",
        "ready = []",
        f"{_RATES}::test_the_link_is_measured",
    ),
    Mutation(
        "measure/calibration.py",
        "PinnedBlock(_LINK_BYTES, device, link.synchronize)",
        'PinnedBlock(_LINK_BYTES, torch.device("cpu"), link.synchronize)',
        f"{_RATES}::test_the_link_is_measured",
    ),
    Mutation(
        "measure/host_rates.py",
        "torch.accelerator.synchronize(device)",
        "pass",
        f"{_RATES}::test_what_it_computes_at_is_measured",
    ),
    Mutation(
        "deepspeed/timer.py",
        "torch.accelerator.synchronize()",
        "pass",
        f"{_WAITS}::test_seconds_of_a_part_are_those_of_its_work_on_the_device",
    ),
    # --- waits that lead to these, where a step or a commit ends ---
    Mutation(
        "step/schedule.py",
        "            path.wait()\n",
        "            pass\n",
        f"{_STEPS}[none-host-bf16]",
    ),
    Mutation(
        "step/backward_overlap.py",
        "            path.wait()\n",
        "            pass\n",
        f"{_STEPS}[backward-host-bf16]",
    ),
    Mutation(
        "step/schedule.py",
        "self.wait(uncovered)",
        "pass",
        "unit/step/test_forward_waits.py"
        "::test_a_parameter_outside_of_the_module_is_new_when_step_returns",
    ),
    Mutation(
        "step/schedule.py",
        ", *shared]",
        "]",
        "unit/step/test_aliases.py::test_an_alias_from_before_the_step_sees_the_new_weight",
    ),
    Mutation(
        "step/schedule.py",
        "for tensor in under_way.parts:",
        "for tensor in ():",
        "unit/step/test_aliases.py::test_changes_of_gradients_and_states_wait_for_their_update",
    ),
    Mutation(
        "step/speculative_overlap.py",
        "if self._shared(on_host) and",
        "if False and",
        "unit/step/test_aliases.py::test_an_alias_sees_the_old_weight_until_a_step_is_confirmed",
    ),
    Mutation(
        "step/schedule.py",
        "self._params.update_router.step_path.join()  # also",
        "pass  # also",
        f"{_ASKS}",
    ),
    Mutation(
        "step/schedule.py",
        "self._params.update_router.step_path.wait(None if ids is None else numbers)",
        "pass",
        f"{_STEPS}[forward-host-bf16]",
    ),
    Mutation(
        "step/schedule.py",
        "            self.wait()\n\n\n",
        "            pass\n\n\n",
        "unit/step/test_forward_waits.py::test_closing_ends_the_step_that_is_under_way",
    ),
    Mutation(
        "step/schedule.py",
        "elif self._params.update_router.step_path.works_between_reads:",
        "elif False:",
        "unit/fsdp/test_forward_on_disk.py"
        "::test_a_read_of_a_weight_that_is_new_lets_the_updates_of_others_go_on",
    ),
    Mutation(
        "step/disk_feed.py",
        "        self._pins.leave_room()\n",
        "        pass\n",
        "unit/step/test_disk_feed.py::test_beside_a_forward_room_is_left_for_what_computes",
    ),
    Mutation(
        "fsdp/gradient_offload.py",
        "torch.autograd.graph.increment_version(written.elements)",
        "pass",
        "unit/fsdp/test_forward_on_disk.py"
        "::test_a_gradient_that_is_written_before_its_update_is_an_error",
    ),
    Mutation(
        "step/replaced.py",
        "not is_in_storage(param.owner) and ",
        "",
        "unit/fsdp/test_forward_on_disk.py"
        "::test_a_weight_is_read_and_written_through_an_alias_from_before_the_step",
    ),
    Mutation(
        "step/managed_param.py",
        "if param.pager is not None:\n            continue",
        "if False:\n            continue",
        "unit/fsdp/test_forward_on_disk.py::test_weights_on_disk_are_not_made_nan",
    ),
    Mutation(
        "io/scratch.py",
        "share * total - self._ends[file]",
        "total / len(self._shares) - self._ends[file]",
        "unit/fsdp/test_several_drives.py::test_each_drive_has_a_share_by_its_rate",
    ),
    Mutation(
        "store/store.py",
        "parts.manifest.extents(), shares)",
        "parts.manifest.extents())",
        "unit/fsdp/test_several_drives.py::test_each_drive_has_a_share_by_its_rate",
    ),
    Mutation(
        "states/scratch.py",
        "sizes, shares)\n        self",
        "sizes)\n        self",
        "unit/states/test_scratch.py::test_chunks_follow_the_rates_of_the_drives",
    ),
    Mutation(
        "step/disk_feed.py",
        "            self.wait(None)\n",
        "            pass\n",
        "unit/step/test_disk_feed.py::test_what_is_left_is_handed_over_unit_by_unit",
    ),
    Mutation(
        "step/schedule.py",
        "                self._params.update_router.step_path.wait(())\n",
        "                pass\n",
        "unit/fsdp/test_forward_on_disk.py"
        "::test_a_read_of_a_weight_that_is_new_lets_the_updates_of_others_go_on",
    ),
    Mutation(
        _FEED,
        "self._close_waits = not overlap_with.goes_on_in_forward",
        "self._close_waits = True",
        "unit/step/test_gradient_feed.py::test_a_step_beside_a_forward_is_closed_without_waiting",
    ),
    Mutation(_FEED, "            feed.join()\n", "            pass\n", f"{_ASKS}"),
    Mutation(
        _FEED,
        "                    feed.wait(None)\n",
        "                    pass\n",
        "unit/step/test_gradient_feed.py::test_a_step_that_commits_is_over_when_it_is_closed",
    ),
    Mutation(
        _FEED,
        "            feed.wait(numbers)\n",
        "            pass\n",
        f"{_STEPS}[forward-host-bf16]",
    ),
    Mutation(_DEVICE_FEED, "        self.join()\n", "        pass\n", f"{_STEPS}[none-host-bf16]"),
    Mutation(
        _FEED,
        "if self._commits or self._runs_to_end:",
        "if self._commits:",
        f"{_WAITS}::test_nothing_is_under_way_when_the_end_of_a_step_is_interrupted",
    ),
    Mutation(
        "fsdp/placements.py",
        "            alive.wait([parameter])\n",
        "            pass\n",
        f"{_WAITS}::test_whoever_reads_a_weight_in_host_memory_waits_for_its_update",
    ),
    Mutation(
        _H2D,
        "            self.buffers.wait_for_copies()\n            for copied",
        "            for copied",
        f"{_WAITS}::test_host_memory_that_is_uploaded_changes_behind_that[discard]",
    ),
    Mutation(
        _H2D,
        "            self.buffers.wait_for_copies()\n            copied =",
        "            copied =",
        f"{_WAITS}::test_host_memory_that_is_uploaded_changes_behind_that[write]",
    ),
    Mutation(_QUEUE, "            self._queue.wait_for(self)\n", "            pass\n", f"{_SUMS}"),
    # --- schedules that serialise: nothing is wrong but the time ---
    Mutation(
        _DEVICE,
        "self._h2d_stream = torch.Stream(device=device)",
        "self._h2d_stream = self._d2h_stream",
        f"{_SCHEDULES}::test_a_forward_begins_while_gradients_of_later_units_are_held_up",
    ),
    Mutation(
        _DEVICE,
        "self._d2h_stream = torch.Stream(device=device)",
        "self._d2h_stream = torch.accelerator.current_stream(device)",
        f"{_COMPUTES}[device]",
    ),
    Mutation(
        _DEVICE,
        "link = StreamLink(self.device)\n",
        "link = self\n        return link\n",
        f"{_BOTH_WAYS}[0.5]",
    ),
    Mutation(
        _H2D,
        "islice(self._order.following(), self._ahead)",
        "islice(self._order.following(), 0)",
        f"{_BESIDE}[host]",
    ),
    Mutation(
        "fsdp/shard_storage.py",
        "islice(self._order.following(), self._ahead)",
        "islice(self._order.following(), 0)",
        f"{_BESIDE}[disk]",
    ),
    Mutation(
        "fsdp/gradient_offload.py",
        "            self._in_flight.append(_Copy(sent, 0, source.numel(), complete))\n",
        "            self._in_flight.append(_Copy(sent, 0, source.numel(), complete))\n"
        "            complete.synchronize()\n",
        f"{_BESIDE}[device]",
    ),
    Mutation(
        _QUEUE,
        "            self._waiting.append(self._hold(sent))\n        self.poll()\n",
        "            self._waiting.append(self._hold(sent))\n        self.poll()\n"
        "        self.wait_for(total)\n",
        f"{_BESIDE}[host, micro-batches]",
    ),
    Mutation(
        _FEED,
        "                feed.send(chunk)\n",
        "                pass\n",
        f"{_BESIDE}[device, backward]",
    ),
    Mutation(
        _FEED,
        "self._newest_first = is_early and overlap_with.goes_on_in_forward",
        "self._newest_first = False",
        f"{_REST}::test_what_forward_needs_first_is_updated_before_what_has_waited_longer",
    ),
    Mutation(
        _DEVICE_FEED,
        "event is None or event.query() for event in events",
        "True for _ in events",
        "unit/step/test_device_feed.py::test_the_newest_that_is_computed_goes_first",
    ),
    Mutation(
        "step/backward_overlap.py",
        "        super().wait(ids)\n",
        "        pass\n",
        f"{_REST}::test_the_next_forward_waits_for_what_is_left_block_by_block",
    ),
    Mutation(
        "step/backward_overlap.py",
        "still_read = self.gradients.held_by_number",
        "still_read = {}",
        f"{_REST}::test_gradients_that_are_read_still_are_not_given_to_others",
    ),
    Mutation(
        "step/backward_overlap.py",
        "waits.blind or plan.commits",
        "waits.blind",
        f"{_REST}::test_others_are_new_when_step_returns",
    ),
    Mutation(
        "step/backward_overlap.py",
        "            self._go_on(left, self._going_on, self._shared(on_host))",
        "            pass",
        f"{_REST}::test_the_next_forward_waits_for_what_is_left_block_by_block",
    ),
    Mutation(
        _FEED,
        "for arrived in self._arriving.pop_complete():",
        "for arrived in ():",
        f"{_BESIDE}[host, backward]",
    ),
    Mutation(
        _DEVICE_FEED,
        "        self._d2h.add(_ChunkInFlight(chunk, slot, pieces), copied)\n",
        "        self._d2h.add(_ChunkInFlight(chunk, slot, pieces), copied)\n"
        "        copied.synchronize()\n",
        f"{_BESIDE}[device, backward]",
    ),
    Mutation(
        _DEVICE_FEED,
        "self._h2d = self.link.h2d(pairs)",
        "self._h2d = self.link.h2d(pairs)\n        self._h2d.synchronize()",
        f"{_SCHEDULES}::test_a_step_is_over_while_its_weights_go_up",
    ),
    Mutation(
        _DEVICE_FEED,
        "self._free = list(range(self.plan.slots))",
        "self._free = [0]",
        f"{_SCHEDULES}::test_gradients_come_down_before_others_are_used",
    ),
    Mutation(
        "step/schedule.py",
        "        if uncovered:\n            self.wait(uncovered)\n",
        "        self.wait()\n",
        f"{_SCHEDULES}::test_a_forward_begins_while_gradients_of_later_units_are_held_up",
    ),
    Mutation(
        "step/schedule.py",
        "self._params.update_router.step_path.wait(None if ids is None else numbers)",
        "self._params.update_router.step_path.wait(None)",
        f"{_BESIDE}[host, forward]",
    ),
    Mutation(
        _FEED,
        "not (is_early and self._share_tuner.is_final)",
        "True",
        f"{_BESIDE}[device, updated there, backward]",
    ),
    Mutation(
        _SIDES,
        "if len(busy) == 1:\n                busy[0].wait_for_one()\n"
        "            else:\n                either.wait(busy, seen)\n",
        "busy[0].wait_for_one()\n",
        f"{_BOTH_WAYS}[0.5]",
    ),
    Mutation(
        _SIDES,
        "        try:\n            copied.synchronize()\n"
        "        finally:\n            self._changes.signal()\n",
        "        copied.synchronize()\n",
        "unit/step/test_both_sides.py::test_either_side_may_be_the_first",
    ),
    Mutation(
        "states/memory.py",
        "MOST_DEVICE_SLOTS = 3",
        "MOST_DEVICE_SLOTS = 1",
        f"{_BOTH_WAYS}[device]",
    ),
    Mutation(
        _UPDATER,
        "            copied = self.link.d2h(d2h_pairs, [self.link.record_event()])\n",
        "            copied = self.link.d2h(d2h_pairs, [self.link.record_event()])\n"
        "            copied.synchronize()\n",
        f"{_BOTH_WAYS}[device]",
    ),
    # --- saved activations ---
    Mutation(
        _SAVED,
        "[(storage.host, whole)], [link.record_event()]",
        "[(storage.host, whole)], []",
        f"{_ACTIVATIONS}::test_gradients_are_those_without_it",
    ),
    Mutation(
        _SAVED,
        "[(target, storage.data)], [link.record_event()]",
        "[(target, storage.data)], []",
        f"{_ACTIVATIONS}::test_gradients_are_those_without_it",
    ),
    Mutation(
        _SAVED,
        "self._links[storage.device].join(storage.ready)",
        "pass",
        f"{_ACTIVATIONS}::test_gradients_are_those_without_it",
    ),
    Mutation(
        _SAVED,
        "return oldest.copied.synchronize",
        "pass",
        f"{_ACTIVATIONS}::test_gradients_are_those_without_it",
    ),
    Mutation(
        _COPIES,
        "and self._copies[0][1].query():",
        ":",
        f"{_ACTIVATIONS}::test_a_block_that_is_still_copied_up_is_given_to_no_read",
    ),
    Mutation(
        _COPIES,
        "copied.synchronize()",
        "pass",
        f"{_ACTIVATIONS}::test_a_backward_whose_copies_are_late",
    ),
    Mutation(
        _BLOCKS,
        "if ready is not None and not ready.query():",
        "if False:",
        f"{_ACTIVATIONS}::test_a_block_that_is_still_copied_up_is_given_to_no_read",
    ),
    Mutation(
        _BLOCKS,
        "return PinnedBlock(padded, device, link.synchronize)",
        "return PinnedBlock(padded, device, lambda: None)",
        f"{_ACTIVATIONS}::test_memory_that_late_copies_use_outlives_the_offload",
    ),
    Mutation(
        _SAVED,
        "copied.synchronize()\n        if self._scratch",
        "pass\n        if self._scratch",
        f"{_ACTIVATIONS}::test_a_tensor_that_a_late_copy_reads_outlives_the_offload",
    ),
    Mutation(
        _SAVED,
        "if self._used.fits(nbytes):\n                    break",
        "if False:\n                    break",
        f"{_ACTIVATIONS}::test_forward_to_disk_does_not_wait_for_the_link_while_there_is_room",
    ),
    Mutation(
        "activations/saved.py",
        "return self.copied is None or self.copied.query()",
        "return True",
        f"{_ACTIVATIONS}::test_a_forward_that_is_dropped_while_its_copies_are_late",
    ),
)
