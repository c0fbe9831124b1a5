// Store that forwards to another one and counts the keys and requests.
//
// Thread safety: any thread.

#ifndef BRIGADE_TESTS_SUPPORT_COUNTING_STORE_H_
#define BRIGADE_TESTS_SUPPORT_COUNTING_STORE_H_

#include <cstdint>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <unordered_set>
#include <utility>
#include <vector>

namespace brigade::testing {

class CountingStore : public c10d::PrefixStore {
 public:
  explicit CountingStore(c10::intrusive_ptr<c10d::Store> store)
      : c10d::PrefixStore("", std::move(store)) {}

  int64_t num_requests() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return num_requests_;
  }
  int64_t num_keys() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(keys_.size());
  }

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    note({key});
    PrefixStore::set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    note({key});
    return PrefixStore::get(key);
  }
  void append(const std::string& key,
              const std::vector<uint8_t>& value) override {
    note({key});
    PrefixStore::append(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    note(keys);
    return PrefixStore::check(keys);
  }

 private:
  void note(const std::vector<std::string>& keys) {
    const std::lock_guard<std::mutex> lock(mutex_);
    keys_.insert(keys.begin(), keys.end());
    ++num_requests_;
  }

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::unordered_set<std::string> keys_;
  int64_t num_requests_ = 0;
};

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_SUPPORT_COUNTING_STORE_H_
