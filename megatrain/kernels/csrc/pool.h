// A small persistent thread pool, separate from torch's: updates run beside torch's own work.
#pragma once

#include <cstdint>
#include <functional>

namespace megatrain {

// Calls body(begin, end) on ranges which cover [0, size), each but the last `grain` long, on the
// calling thread and up to `threads - 1` helpers. Returns when all of them are done.
// Any number of threads may call at once; each works on its own call, so none waits for another's.
void parallel_for(int64_t size, int64_t grain, int threads,
                  const std::function<void(int64_t, int64_t)>& body);

}  // namespace megatrain
