#include "pipeline/slot_transfers.h"

#include <algorithm>

namespace stow {

void SlotTransfers::read(PipelineChunk& chunk) {
  chunk.move(ChunkState::reading);
  chunk.slot_states = SlotStates::unverified;
  submit(chunk, Op::read, chunk.place, 0, chunk.parts.layout.streams);
}

void SlotTransfers::write(PipelineChunk& chunk, int first_part, int parts) {
  chunk.move(ChunkState::writing);
  submit(chunk, Op::write, chunk.target, first_part, parts);
}

void SlotTransfers::submit(PipelineChunk& chunk, Op op, DiskPosition place, int first_part,
                           int parts) {
  chunk.mover = this;
  chunk.started = now();
  chunk.moving = 0;
  chunk.transfers_left = chunk.transfer_count = parts;
  for (int k = 0; k < parts; ++k) {
    const Layout::Part& part = chunk.parts.layout.parts[first_part + k];
    Transfer& t = chunk.transfers[k];
    t = Transfer{};
    t.file = place.file;
    t.op = op;
    t.data = data_.ring_of(chunk).part(chunk, first_part + k);
    t.length = part.bytes;
    t.offset = place.offset + part.file_at;
    t.done = &SlotTransfers::on_transfer;
    t.context = &chunk;
    chunk.moving += part.bytes;
  }
  for (int k = 0; k < parts; ++k) engine_.submit(&chunk.transfers[k]);
}

void SlotTransfers::on_transfer(Transfer* transfer) {
  PipelineChunk& chunk = *static_cast<PipelineChunk*>(transfer->context);
  chunk.mover->end(chunk, *transfer);
}

void SlotTransfers::end(PipelineChunk& chunk, const Transfer& transfer) {
  const PipelineMonitor::Lock lock = data_.monitor.lock();
  if (transfer.error != 0) {
    data_.monitor.fail({transfer.error, transfer.file, chunk.number, transfer.op,
                        transfer.error_offset, transfer.error_length});
  }
  const bool reading = transfer.op == Op::read;
  (reading ? data_.counters.bytes_read : data_.counters.bytes_written) += transfer.moved;
  if (--chunk.transfers_left != 0) return;
  data_.trace.record(
      {chunk.started, now(), reading ? Lane::read : Lane::write, chunk.number, chunk.moving});
  const bool failed = std::any_of(chunk.transfers, chunk.transfers + chunk.transfer_count,
                                  [](const Transfer& t) { return t.error != 0; });
  on_end_(chunk, transfer.op, failed);
  data_.monitor.wake_scheduler();
  data_.monitor.wake_callers();
}

}  // namespace stow
