// A store that counts the keys which its owner reads and writes, on behalf of
// another one.
//
// Thread safety: any thread.

#ifndef BRIGADE_TESTS_SUPPORT_COUNTING_STORE_H_
#define BRIGADE_TESTS_SUPPORT_COUNTING_STORE_H_

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unordered_set>
#include <utility>
#include <vector>

namespace brigade::testing {

class CountingStore : public c10d::Store {
 public:
  explicit CountingStore(c10::intrusive_ptr<c10d::Store> store)
      : store_(std::move(store)) {}

  // Since it was made.
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
    store_->set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    note({key});
    return store_->get(key);
  }
  void append(const std::string& key,
              const std::vector<uint8_t>& value) override {
    note({key});
    store_->append(key, value);
  }
  bool hasExtendedApi() const override { return store_->hasExtendedApi(); }
  int64_t add(const std::string& key, int64_t value) override {
    note({key});
    return store_->add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    note(keys);
    return store_->check(keys);
  }
  void wait(const std::vector<std::string>& keys) override {
    note(keys);
    store_->wait(keys);
  }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    note(keys);
    store_->wait(keys, timeout);
  }
  bool deleteKey(const std::string& key) override {
    return store_->deleteKey(key);
  }
  int64_t getNumKeys() override { return store_->getNumKeys(); }
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::intrusive_ptr<c10d::Store>::reclaim_copy(this);
  }

 private:
  void note(const std::vector<std::string>& keys) {
    const std::lock_guard<std::mutex> lock(mutex_);
    keys_.insert(keys.begin(), keys.end());
    ++num_requests_;
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::unordered_set<std::string> keys_;
  int64_t num_requests_ = 0;
};

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_SUPPORT_COUNTING_STORE_H_
