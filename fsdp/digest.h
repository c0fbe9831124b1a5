// What ranks compare in place of lists of numbers: one number, which is another
// one if any number of the lists is, or their order or length.
//
//   const uint64_t told = Digest().add(2).add_all(order).value();
//
// Thread safety: a value.

#ifndef BRIGADE_FSDP_DIGEST_H_
#define BRIGADE_FSDP_DIGEST_H_

#include <cstdint>
#include <vector>

namespace brigade {

class Digest {
 public:
  // Source: the finaliser of MurmurHash3, on what came before and the number.
  Digest& add(uint64_t number) {
    state_ = (state_ ^ number) + 0x9e3779b97f4a7c15;
    state_ = (state_ ^ state_ >> 33) * 0xff51afd7ed558ccd;
    state_ = (state_ ^ state_ >> 33) * 0xc4ceb9fe1a85ec53;
    state_ ^= state_ >> 33;
    return *this;
  }

  template <typename T>
  Digest& add_all(const std::vector<T>& numbers) {
    add(numbers.size());
    for (const T& number : numbers) add(static_cast<uint64_t>(number));
    return *this;
  }

  // Never 0, which stands for no digest.
  uint64_t value() const { return state_ == 0 ? 1 : state_; }

 private:
  uint64_t state_ = 0;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_DIGEST_H_
