// Counts what the program takes from the heap with operator new.
//
// Thread safety: may be read from any thread; counts all of them.

#ifndef BRIGADE_BENCHMARKS_REDUCER_COST_HEAP_COUNTER_H_
#define BRIGADE_BENCHMARKS_REDUCER_COST_HEAP_COUNTER_H_

#include <cstdint>

namespace brigade::benchmarks {

// Since the program began, LibTorch's included.
int64_t heap_allocations();

}  // namespace brigade::benchmarks

#endif  // BRIGADE_BENCHMARKS_REDUCER_COST_HEAP_COUNTER_H_
