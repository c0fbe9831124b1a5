// What becomes of a tensor in a collective of OrderedCollectives.

#ifndef BRIGADE_COMM_ORDERED_ORDERED_KIND_H_
#define BRIGADE_COMM_ORDERED_ORDERED_KIND_H_

namespace brigade {

enum class OrderedKind { kAllReduce, kReduceScatter, kAllGather };

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_ORDERED_KIND_H_
