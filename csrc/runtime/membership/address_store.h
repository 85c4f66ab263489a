// Where the ranks of a Gloo group leave their addresses.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace commhook {

// A store in which Gloo finds the addresses of a group's ranks, which it asks for one by one. The
// first time all are read in one request. Gloo may ask from threads of its own.
class AddressStore : public c10d::Store {
 public:
  // store: that all ranks reach, for this group alone. ranks: whose addresses are read together;
  // those of others are read one by one.
  AddressStore(c10::intrusive_ptr<c10d::Store> store, std::vector<int64_t> ranks);

  // Reads the addresses of all ranks that are read together, once they have written them.
  // Throws if they have not within the timeout.
  void read(const std::chrono::milliseconds& timeout);

  // Takes what this rank has written out of the store. Other ranks must not need it any more.
  void remove_own();

  // What this rank has written, also after remove_own().
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
  // Whether the key is known, once it and all that are read with it are there.
  bool read_with_others(const std::string& key, const std::chrono::milliseconds& timeout);

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::vector<int64_t> ranks_;
  mutable std::mutex mutex_;
  std::map<std::string, std::vector<uint8_t>> known_;
  std::vector<std::string> own_keys_;
  std::vector<std::vector<uint8_t>> own_values_;
};

}  // namespace commhook
