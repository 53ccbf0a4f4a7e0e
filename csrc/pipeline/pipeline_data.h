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
  explicit PipelineData(Order kind) : ring(counters), order(kind, chunks), deferred(chunks) {}

  // Whether a caller of the step may do the scheduler's work ([Note: Help] in scheduler.h).
  bool takes_help() const {
    const bool helps = step.is_under_way() && step.spec().caller == Caller::helps;
    return helps && !monitor.is_replaced() && !monitor.has_failed();
  }

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
  ChunkTable chunks;
  CurrentStep step;
  ReadOrder order;
  DeferredUpdates deferred;
  UpdateQueues queues;
};

}  // namespace stow
