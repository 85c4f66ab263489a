// TLS 1.3 with a key that both sides have: both are proven and all is encrypted, without
// certificates.
//
// OpenSSL 3 is loaded when a key is first given. Each connection has new secrets (PSK with
// Diffie-Hellman), so whoever gets the key later cannot read what was sent before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace commhook::wire {

class TlsSession;

// What all connections of an endpoint share.
class Tls {
 public:
  static constexpr size_t kKeyBytes = 32;

  // Errors: c10::ValueError for a key of another length, c10::DistNetworkError without OpenSSL 3.
  explicit Tls(std::string key);
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;
  ~Tls();

  // Of a connection that this side has opened (is_client) or accepted. This must outlive it.
  [[nodiscard]] std::unique_ptr<TlsSession> session(bool is_client) const;
  // Such as "OpenSSL 3.0.13 30 Jan 2024".
  static std::string version();

 private:
  friend class TlsSession;
  const std::string key_;
  void* const context_;
};

// A connection without its socket: its caller carries bytes to and from that.
class TlsSession {
 public:
  TlsSession(const Tls& tls, bool is_client);
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;
  ~TlsSession();

  // Whether both sides are proven. Before that nothing can be written.
  [[nodiscard]] bool is_agreed() const { return is_agreed_; }
  // Takes bytes from the socket. False: they are wrong, or the other side has another key.
  [[nodiscard]] bool take(const uint8_t* data, size_t size);
  // Writes at most `size` bytes that have come; returns their number, or -1 for wrong ones.
  [[nodiscard]] int64_t read(uint8_t* data, size_t size);
  // Encrypts bytes for the socket.
  void write(const uint8_t* data, size_t size);
  // What goes to the socket, and that so many bytes of it are there.
  [[nodiscard]] const uint8_t* to_send() const { return out_.data() + out_sent_; }
  [[nodiscard]] size_t to_send_size() const { return out_.size() - out_sent_; }
  void sent(size_t count);

 private:
  bool agree();
  void collect();

  void* const ssl_;
  void* in_;  // BIO, which ssl_ owns
  void* outgoing_;
  bool is_agreed_ = false;
  uint64_t written_ = 0;  // since the last change of keys
  std::vector<uint8_t> out_;
  size_t out_sent_ = 0;
};

}  // namespace commhook::wire
