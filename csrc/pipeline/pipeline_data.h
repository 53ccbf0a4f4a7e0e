// What the classes of a pipeline share; [Note: One lock] in monitor.h.
#pragma once

#include "base/trace.h"
#include "pipeline/chunk_table.h"
#include "pipeline/current_step.h"
#include "pipeline/deferred_updates.h"
#include "pipeline/monitor.h"
#include "pipeline/read_order.h"
#include "pipeline/slot_ring.h"
#include "pipeline/update_queues.h"

namespace stow {

struct PipelineData {
  explicit PipelineData(Order kind) : order(kind, chunks), deferred(chunks) {}

  // Whether a caller of the step may do the scheduler's work ([Note: Help] in scheduler.h).
  bool takes_help() const {
    const bool helps = step.is_under_way() && step.spec().caller == Caller::helps;
    return helps && !monitor.is_replaced() && !monitor.has_failed();
  }

  SlotRing& ring_of(const PipelineChunk& chunk) { return chunk.spec.is_small ? small_ring : ring; }
  std::int64_t slots_in_use() const { return ring.in_use() + small_ring.in_use(); }

  // A caller was blocked since `start`.
  void record_wait(double start) {
    const double stop = now();
    counters.wait_seconds += stop - start;
    trace.record({start, stop, Lane::wait, -1, 0});
  }

  PipelineMonitor monitor;
  Trace trace;
  PipelineCounters counters;
  SlotRing ring;
  SlotRing small_ring;  // [Note: Small slots] in scheduler.cpp
  ChunkTable chunks;
  CurrentStep step;
  ReadOrder order;
  DeferredUpdates deferred;
  UpdateQueues queues;
};

}  // namespace stow
