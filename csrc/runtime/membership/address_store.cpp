#include "runtime/membership/address_store.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace commhook {
namespace {

// Splits a key such as "0/3" into the text before the rank and the rank; none if it has no rank.
std::optional<std::pair<std::string, int64_t>> parts_of(const std::string& key) {
  const auto slash = key.rfind('/');
  const auto digits = slash == std::string::npos ? key : key.substr(slash + 1);
  if (digits.empty() || digits.size() > 9 ||
      !std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; })) {
    return std::nullopt;
  }
  return std::pair(key.substr(0, key.size() - digits.size()), std::stoll(digits));
}

}  // namespace

AddressStore::AddressStore(c10::intrusive_ptr<c10d::Store> store, std::vector<int64_t> ranks)
    : Store(store->getTimeout()), store_(std::move(store)), ranks_(std::move(ranks)) {}

c10::intrusive_ptr<c10d::Store> AddressStore::clone() {
  return c10::make_intrusive<AddressStore>(store_->clone(), ranks_);
}

void AddressStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  {
    const std::lock_guard lock(mutex_);
    known_[key] = value;
    own_keys_.push_back(key);
    own_values_.push_back(value);
  }
  store_->set(key, value);
}

void AddressStore::remove_own() {
  std::vector<std::string> keys;
  {
    const std::lock_guard lock(mutex_);
    keys.swap(own_keys_);
  }
  for (const auto& key : keys) {
    store_->deleteKey(key);
  }
}

std::vector<std::vector<uint8_t>> AddressStore::own() const {
  const std::lock_guard lock(mutex_);
  return own_values_;
}

void AddressStore::read(const std::chrono::milliseconds& timeout) {
  std::vector<std::string> own_keys;
  {
    const std::lock_guard lock(mutex_);
    own_keys = own_keys_;
  }
  for (const auto& own : own_keys) {
    const auto parts = parts_of(own);
    if (!parts) {
      continue;
    }
    for (const auto rank : ranks_) {
      read_with_others(parts->first + std::to_string(rank), timeout);
    }
  }
}

bool AddressStore::read_with_others(const std::string& key,
                                    const std::chrono::milliseconds& timeout) {
  {
    const std::lock_guard lock(mutex_);
    if (known_.count(key) > 0) {
      return true;
    }
  }
  const auto parts = parts_of(key);
  if (!parts || std::find(ranks_.begin(), ranks_.end(), parts->second) == ranks_.end()) {
    return false;
  }
  std::vector<std::string> keys;
  {
    const std::lock_guard lock(mutex_);
    for (const auto rank : ranks_) {
      auto each = parts->first + std::to_string(rank);
      if (known_.count(each) == 0) {
        keys.push_back(std::move(each));
      }
    }
  }
  const bool reads_many = store_->hasExtendedApi();
  // multiGet waits itself, for the store's own timeout.
  if (!reads_many || timeout != timeout_) {
    store_->wait(keys, timeout);
  }
  std::vector<std::vector<uint8_t>> values;
  if (reads_many) {
    values = store_->multiGet(keys);
    TORCH_CHECK(values.size() == keys.size(), "AddressStore: the store has ", values.size(),
                " values for ", keys.size(), " keys");
  } else {
    for (const auto& each : keys) {
      values.push_back(store_->get(each));
    }
  }
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < keys.size(); ++i) {
    known_[keys[i]] = std::move(values[i]);
  }
  return true;
}

std::vector<uint8_t> AddressStore::get(const std::string& key) {
  if (read_with_others(key, timeout_)) {
    const std::lock_guard lock(mutex_);
    return known_.at(key);
  }
  return store_->get(key);
}

void AddressStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void AddressStore::wait(const std::vector<std::string>& keys,
                        const std::chrono::milliseconds& timeout) {
  std::vector<std::string> left;
  for (const auto& key : keys) {
    if (!read_with_others(key, timeout)) {
      left.push_back(key);
    }
  }
  if (!left.empty()) {
    store_->wait(left, timeout);
  }
}

int64_t AddressStore::add(const std::string& key, int64_t value) { return store_->add(key, value); }

bool AddressStore::deleteKey(const std::string& key) { return store_->deleteKey(key); }

bool AddressStore::check(const std::vector<std::string>& keys) { return store_->check(keys); }

int64_t AddressStore::getNumKeys() { return store_->getNumKeys(); }

}  // namespace commhook
