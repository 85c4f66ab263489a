// The addresses of a Gloo group's ranks.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace commhook {

// A store from which Gloo reads the addresses of a group's ranks one by one. The first read fetches
// all of them in one request. Gloo may call it from its own threads.
class AddressStore : public c10d::Store {
 public:
  // store: reachable by all ranks, for this group alone. ranks: the ranks whose addresses are read
  // together; other addresses are read one by one.
  AddressStore(c10::intrusive_ptr<c10d::Store> store, std::vector<int64_t> ranks);

  // Waits for the addresses of all `ranks` and reads them. Throws an error after the timeout.
  void read(const std::chrono::milliseconds& timeout);

  // Deletes this rank's entries from the store. Other ranks must not need them any more.
  void remove_own();

  // This rank's entries, also after remove_own().
  [[nodiscard]] std::vector<std::vector<uint8_t>> own() const;

  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;

 private:
  // Whether the key is known, after it and all keys that are read with it have been written.
  bool read_with_others(const std::string& key, const std::chrono::milliseconds& timeout);

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::vector<int64_t> ranks_;
  mutable std::mutex mutex_;
  std::map<std::string, std::vector<uint8_t>> known_;
  std::vector<std::string> own_keys_;
  std::vector<std::vector<uint8_t>> own_values_;
};

}  // namespace commhook
