#include "runtime/wire/tls.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <algorithm>
#include <climits>

namespace commhook::wire {
namespace {

constexpr unsigned char kIdentity[] = "commhook";
constexpr int kTls13 = 0x0304;
constexpr unsigned char kCipher[] = {0x13, 0x01};  // TLS_AES_128_GCM_SHA256
constexpr int kSetMinimum = 123;                   // SSL_CTRL_SET_MIN_PROTO_VERSION
constexpr int kVerifyPeer = 1;
constexpr int kWantRead = 2;
// Far below the number of records for which one key is safe.
constexpr uint64_t kBytesOfKey = uint64_t{1} << 36;

// The functions of OpenSSL 3 that are used here. Its types are not needed.
struct OpenSsl {
  using FindSession = int (*)(void* ssl, const unsigned char* identity, size_t size,
                              void** session);
  using UseSession = int (*)(void* ssl, const void* digest, const unsigned char** identity,
                             size_t* size, void** session);

  const void* (*TLS_method)();
  void* (*SSL_CTX_new)(const void*);
  void (*SSL_CTX_free)(void*);
  long (*SSL_CTX_ctrl)(void*, int, long, void*);
  int (*SSL_CTX_set_ciphersuites)(void*, const char*);
  int (*SSL_CTX_set_num_tickets)(void*, size_t);
  void (*SSL_CTX_set_verify)(void*, int, void*);
  void (*SSL_CTX_set_psk_find_session_callback)(void*, FindSession);
  void (*SSL_CTX_set_psk_use_session_callback)(void*, UseSession);
  void* (*SSL_new)(void*);
  void (*SSL_free)(void*);
  void (*SSL_set_bio)(void*, void*, void*);
  void (*SSL_set_connect_state)(void*);
  void (*SSL_set_accept_state)(void*);
  int (*SSL_set_session_id_context)(void*, const unsigned char*, unsigned);
  int (*SSL_do_handshake)(void*);
  int (*SSL_get_error)(const void*, int);
  int (*SSL_session_reused)(const void*);
  int (*SSL_read)(void*, void*, int);
  int (*SSL_write)(void*, const void*, int);
  int (*SSL_key_update)(void*, int);
  int (*SSL_set_ex_data)(void*, int, void*);
  void* (*SSL_get_ex_data)(const void*, int);
  void* (*SSL_SESSION_new)();
  int (*SSL_SESSION_set1_master_key)(void*, const unsigned char*, size_t);
  int (*SSL_SESSION_set_cipher)(void*, const void*);
  int (*SSL_SESSION_set_protocol_version)(void*, int);
  const void* (*SSL_CIPHER_find)(void*, const unsigned char*);
  const void* (*BIO_s_mem)();
  void* (*BIO_new)(const void*);
  int (*BIO_read)(void*, void*, int);
  int (*BIO_write)(void*, const void*, int);
  size_t (*BIO_ctrl_pending)(void*);
  void (*ERR_clear_error)();
  const char* (*OpenSSL_version)(int);
};

const OpenSsl& open_ssl() {
  static const OpenSsl kFunctions = [] {
    OpenSsl found{};
    // Its dependency libcrypto is searched, too.
    void* const library = dlopen("libssl.so.3", RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK_WITH(DistNetworkError, library != nullptr,
                     "a token needs OpenSSL 3 (libssl.so.3), which cannot be loaded: ", dlerror());
#define COMMHOOK_FIND(name)                                                   \
  found.name = reinterpret_cast<decltype(found.name)>(dlsym(library, #name)); \
  TORCH_CHECK_WITH(DistNetworkError, found.name != nullptr, "libssl.so.3 has no ", #name)
    COMMHOOK_FIND(TLS_method);
    COMMHOOK_FIND(SSL_CTX_new);
    COMMHOOK_FIND(SSL_CTX_free);
    COMMHOOK_FIND(SSL_CTX_ctrl);
    COMMHOOK_FIND(SSL_CTX_set_ciphersuites);
    COMMHOOK_FIND(SSL_CTX_set_num_tickets);
    COMMHOOK_FIND(SSL_CTX_set_verify);
    COMMHOOK_FIND(SSL_CTX_set_psk_find_session_callback);
    COMMHOOK_FIND(SSL_CTX_set_psk_use_session_callback);
    COMMHOOK_FIND(SSL_new);
    COMMHOOK_FIND(SSL_free);
    COMMHOOK_FIND(SSL_set_bio);
    COMMHOOK_FIND(SSL_set_connect_state);
    COMMHOOK_FIND(SSL_set_accept_state);
    COMMHOOK_FIND(SSL_set_session_id_context);
    COMMHOOK_FIND(SSL_do_handshake);
    COMMHOOK_FIND(SSL_get_error);
    COMMHOOK_FIND(SSL_session_reused);
    COMMHOOK_FIND(SSL_read);
    COMMHOOK_FIND(SSL_write);
    COMMHOOK_FIND(SSL_key_update);
    COMMHOOK_FIND(SSL_set_ex_data);
    COMMHOOK_FIND(SSL_get_ex_data);
    COMMHOOK_FIND(SSL_SESSION_new);
    COMMHOOK_FIND(SSL_SESSION_set1_master_key);
    COMMHOOK_FIND(SSL_SESSION_set_cipher);
    COMMHOOK_FIND(SSL_SESSION_set_protocol_version);
    COMMHOOK_FIND(SSL_CIPHER_find);
    COMMHOOK_FIND(BIO_s_mem);
    COMMHOOK_FIND(BIO_new);
    COMMHOOK_FIND(BIO_read);
    COMMHOOK_FIND(BIO_write);
    COMMHOOK_FIND(BIO_ctrl_pending);
    COMMHOOK_FIND(ERR_clear_error);
    COMMHOOK_FIND(OpenSSL_version);
#undef COMMHOOK_FIND
    return found;
  }();
  return kFunctions;
}

// The session from which both sides begin. OpenSSL frees it.
void* session_of(void* ssl) {
  const OpenSsl& api = open_ssl();
  const auto* key = static_cast<const std::string*>(api.SSL_get_ex_data(ssl, 0));
  void* const session = api.SSL_SESSION_new();
  const bool is_good =
      session != nullptr &&
      api.SSL_SESSION_set1_master_key(session, reinterpret_cast<const unsigned char*>(key->data()),
                                      key->size()) == 1 &&
      api.SSL_SESSION_set_cipher(session, api.SSL_CIPHER_find(ssl, kCipher)) == 1 &&
      api.SSL_SESSION_set_protocol_version(session, kTls13) == 1;
  return is_good ? session : nullptr;
}

int find_session(void* ssl, const unsigned char* identity, size_t size, void** session) {
  const bool is_ours =
      size == sizeof(kIdentity) && std::equal(identity, identity + size, kIdentity);
  *session = is_ours ? session_of(ssl) : nullptr;
  return 1;
}

int use_session(void* ssl, const void* digest, const unsigned char** identity, size_t* size,
                void** session) {
  (void)digest;  // given after a retry: the cipher has SHA-256, as there is no other
  *session = session_of(ssl);
  *identity = kIdentity;
  *size = sizeof(kIdentity);
  return *session != nullptr ? 1 : 0;
}

void* make_context() {
  const OpenSsl& api = open_ssl();
  void* const context = api.SSL_CTX_new(api.TLS_method());
  TORCH_CHECK_WITH(DistNetworkError, context != nullptr, "SSL_CTX_new has failed");
  // There are no certificates: a side without the key has nothing to prove itself with.
  api.SSL_CTX_set_verify(context, kVerifyPeer, nullptr);
  api.SSL_CTX_set_psk_find_session_callback(context, find_session);
  api.SSL_CTX_set_psk_use_session_callback(context, use_session);
  const bool is_good = api.SSL_CTX_ctrl(context, kSetMinimum, kTls13, nullptr) == 1 &&
                       api.SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") == 1 &&
                       api.SSL_CTX_set_num_tickets(context, 0) == 1;
  if (!is_good) {
    api.SSL_CTX_free(context);
  }
  TORCH_CHECK_WITH(DistNetworkError, is_good, "OpenSSL does not allow TLS 1.3");
  return context;
}

const std::string& checked(const std::string& key) {
  TORCH_CHECK_VALUE(key.size() == Tls::kKeyBytes, "key must have ", Tls::kKeyBytes, " bytes, got ",
                    key.size());
  return key;
}

int at_most(size_t size) { return static_cast<int>(std::min<size_t>(size, INT_MAX)); }

}  // namespace

Tls::Tls(std::string key) : key_(checked(key)), context_(make_context()) {}

Tls::~Tls() { open_ssl().SSL_CTX_free(context_); }

std::unique_ptr<TlsSession> Tls::session(bool is_client) const {
  return std::make_unique<TlsSession>(*this, is_client);
}

std::string Tls::version() { return open_ssl().OpenSSL_version(0); }

TlsSession::TlsSession(const Tls& tls, bool is_client)
    : ssl_(open_ssl().SSL_new(tls.context_)),
      in_(open_ssl().BIO_new(open_ssl().BIO_s_mem())),
      outgoing_(open_ssl().BIO_new(open_ssl().BIO_s_mem())) {
  const OpenSsl& api = open_ssl();
  TORCH_CHECK_WITH(DistNetworkError, ssl_ != nullptr && in_ != nullptr && outgoing_ != nullptr,
                   "OpenSSL has no memory for a connection");
  api.SSL_set_ex_data(ssl_, 0, const_cast<std::string*>(&tls.key_));
  api.SSL_set_bio(ssl_, in_, outgoing_);
  if (is_client) {
    api.SSL_set_connect_state(ssl_);
    (void)agree();  // its first message
  } else {
    api.SSL_set_accept_state(ssl_);
    // A side that accepts and verifies takes no session without one; the other side has none.
    api.SSL_set_session_id_context(ssl_, kIdentity, sizeof(kIdentity));
  }
}

TlsSession::~TlsSession() { open_ssl().SSL_free(ssl_); }

bool TlsSession::agree() {
  const OpenSsl& api = open_ssl();
  api.ERR_clear_error();
  const int result = api.SSL_do_handshake(ssl_);
  const int error = api.SSL_get_error(ssl_, result);
  collect();
  if (result == 1) {
    is_agreed_ = api.SSL_session_reused(ssl_) == 1;  // by the key, and by nothing else
    return is_agreed_;
  }
  return error == kWantRead;
}

bool TlsSession::take(const uint8_t* data, size_t size) {
  if (open_ssl().BIO_write(in_, data, at_most(size)) != static_cast<int>(size)) {
    return false;
  }
  return is_agreed_ || agree();
}

int64_t TlsSession::read(uint8_t* data, size_t size) {
  if (!is_agreed_ || size == 0) {
    return 0;
  }
  const OpenSsl& api = open_ssl();
  api.ERR_clear_error();
  size_t all = 0;
  while (all < size) {
    const int count = api.SSL_read(ssl_, data + all, at_most(size - all));
    if (count <= 0) {
      const int error = api.SSL_get_error(ssl_, count);
      collect();  // the other side may have changed keys
      return error == kWantRead ? static_cast<int64_t>(all) : -1;
    }
    all += count;
  }
  return static_cast<int64_t>(all);
}

void TlsSession::write(const uint8_t* data, size_t size) {
  const OpenSsl& api = open_ssl();
  while (size > 0) {
    api.ERR_clear_error();
    const int count = api.SSL_write(ssl_, data, at_most(size));
    TORCH_CHECK_WITH(DistNetworkError, count > 0, "SSL_write has failed");  // no memory
    data += count;
    size -= count;
    written_ += count;
  }
  if (written_ >= kBytesOfKey) {
    written_ = 0;
    api.SSL_key_update(ssl_, 0);  // goes with the next bytes
  }
  collect();
}

void TlsSession::collect() {
  const OpenSsl& api = open_ssl();
  const size_t more = api.BIO_ctrl_pending(outgoing_);
  const size_t before = out_.size();
  out_.resize(before + more);
  if (more > 0) {
    api.BIO_read(outgoing_, out_.data() + before, at_most(more));
  }
}

void TlsSession::sent(size_t count) {
  out_sent_ += count;
  if (2 * out_sent_ >= out_.size()) {
    out_.erase(out_.begin(), out_.begin() + static_cast<ptrdiff_t>(out_sent_));
    out_sent_ = 0;
  }
}

}  // namespace commhook::wire
