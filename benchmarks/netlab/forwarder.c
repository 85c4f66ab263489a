/* Forwards frames between the ports of a switch, each a given time after its arrival.
 *
 * forwarder PORT MAC [PORT MAC ...]: the interfaces, and the address of the host behind each.
 * Each line "DELAY_NS LOSS" of standard input sets the delay and the share of frames to drop, from
 * 0 to 1. The program answers each line with "ok", and exits at the end of its input.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST_PORTS = 256, MOST_BYTES = 1 << 18, MOST_AT_ONCE = 64, BUFFER_BYTES = 256 << 20 };

/* The size of struct virtio_net_hdr (linux/virtio_net.h, which some systems lack). With
 * PACKET_VNET_HDR this header precedes each frame, in both directions. So bundles of packets pass
 * unsplit, and without the checksums that the kernel would compute later. */
enum { BUNDLE_HEADER_BYTES = 10 };

typedef struct {
  int socket;
  unsigned char host[ETH_ALEN];
} Port;

typedef struct Frame {
  struct Frame* next;
  int64_t due;
  int from;
  int size; /* including the header of bundles */
  unsigned char bytes[];
} Frame;

static Port ports[MOST_PORTS];
static int port_count;
static Frame *first, *last;
static int64_t delay;
static double loss;
static uint64_t random_state;

static void fail(const char* what) {
  fprintf(stderr, "forwarder: %s: %s\n", what, strerror(errno));
  exit(1);
}

static int64_t now(clockid_t clock) {
  struct timespec time;
  clock_gettime(clock, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Uniform in [0, 1): SplitMix64. */
static double next_random(void) {
  uint64_t z = random_state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

static void set(int socket, int level, int option, int value, const char* what) {
  if (setsockopt(socket, level, option, &value, sizeof value) != 0) fail(what);
}

static void open_port(const char* name, const char* host) {
  Port* port = &ports[port_count++];
  unsigned bytes[ETH_ALEN];
  if (sscanf(host, "%x:%x:%x:%x:%x:%x", bytes, bytes + 1, bytes + 2, bytes + 3, bytes + 4,
             bytes + 5) != ETH_ALEN) {
    errno = EINVAL;
    fail(host);
  }
  for (int i = 0; i < ETH_ALEN; i++) port->host[i] = (unsigned char)bytes[i];
  /* Protocol 0 until the bind: the socket then gets no frames of other ports before it. */
  port->socket = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, 0);
  if (port->socket < 0) fail("a packet socket");
  set(port->socket, SOL_PACKET, PACKET_VNET_HDR, 1, "PACKET_VNET_HDR");
  set(port->socket, SOL_PACKET, PACKET_IGNORE_OUTGOING, 1, "PACKET_IGNORE_OUTGOING");
  set(port->socket, SOL_SOCKET, SO_TIMESTAMPNS, 1, "SO_TIMESTAMPNS");
  /* Large enough for the queue of a link that this socket fills; only root of the whole system
   * may exceed the system's limits. */
  int size = BUFFER_BYTES;
  if (setsockopt(port->socket, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof size) != 0)
    set(port->socket, SOL_SOCKET, SO_RCVBUF, size, "SO_RCVBUF");
  if (setsockopt(port->socket, SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size) != 0)
    set(port->socket, SOL_SOCKET, SO_SNDBUF, size, "SO_SNDBUF");
  struct sockaddr_ll address = {.sll_family = AF_PACKET,
                                .sll_protocol = htons(ETH_P_ALL),
                                .sll_ifindex = (int)if_nametoindex(name)};
  if (address.sll_ifindex == 0) fail(name);
  if (bind(port->socket, (struct sockaddr*)&address, sizeof address) != 0) fail(name);
}

/* The time at which the kernel received a frame, on the clock of due times: this process may lag. */
static int64_t arrival(struct msghdr* message) {
  for (struct cmsghdr* c = CMSG_FIRSTHDR(message); c != NULL; c = CMSG_NXTHDR(message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_TIMESTAMPNS) continue;
    struct timespec time;
    memcpy(&time, CMSG_DATA(c), sizeof time);
    int64_t age = now(CLOCK_REALTIME) - ((int64_t)time.tv_sec * 1000000000 + time.tv_nsec);
    if (age < 0 || age > 1000000000) age = 0; /* somebody has set the clock */
    return now(CLOCK_MONOTONIC) - age;
  }
  return now(CLOCK_MONOTONIC);
}

/* Queues some of the frames that a port has received, so that other ports get their turn. */
static void receive(int from) {
  static unsigned char buffer[MOST_BYTES];
  for (int i = 0; i < MOST_AT_ONCE; i++) {
    union {
      struct cmsghdr header;
      char bytes[CMSG_SPACE(sizeof(struct timespec))];
    } control;
    struct iovec part = {buffer, sizeof buffer};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = &control,
                             .msg_controllen = sizeof control};
    ssize_t size = recvmsg(ports[from].socket, &message, 0);
    if (size < 0) {
      if (errno == EAGAIN || errno == EINTR || errno == ENETDOWN) return;
      fail("recvmsg");
    }
    if (size < BUNDLE_HEADER_BYTES + ETH_HLEN || message.msg_flags & MSG_TRUNC) continue;
    if (loss > 0 && next_random() < loss) continue;
    Frame* frame = malloc(sizeof *frame + (size_t)size);
    if (frame == NULL) fail("memory");
    frame->next = NULL;
    frame->from = from;
    frame->size = (int)size;
    frame->due = arrival(&message) + delay;
    memcpy(frame->bytes, buffer, (size_t)size);
    /* Keeps the order, even if a port is read late or the delay has become shorter. */
    if (first == NULL)
      first = frame;
    else {
      if (frame->due < last->due) frame->due = last->due;
      last->next = frame;
    }
    last = frame;
  }
}

/* A link with a full queue drops frames, which is not an error. */
static void send_to(int to, const Frame* frame) {
  if (send(ports[to].socket, frame->bytes, (size_t)frame->size, 0) < 0 && errno != ENOBUFS &&
      errno != EAGAIN && errno != ENETDOWN && errno != EINTR)
    fail("send");
}

static void deliver(const Frame* frame) {
  const unsigned char* to = frame->bytes + BUNDLE_HEADER_BYTES;
  if (!(to[0] & 1)) { /* for one host */
    for (int port = 0; port < port_count; port++)
      if (memcmp(ports[port].host, to, ETH_ALEN) == 0) {
        if (port != frame->from) send_to(port, frame);
        return;
      }
    return;
  }
  for (int port = 0; port < port_count; port++)
    if (port != frame->from) send_to(port, frame);
}

static void deliver_due(void) {
  while (first != NULL && first->due <= now(CLOCK_MONOTONIC)) {
    Frame* frame = first;
    deliver(frame);
    first = frame->next;
    free(frame);
  }
}

/* Reads lines of settings from standard input; exits the program at its end. */
static void read_settings(void) {
  static char line[128];
  static size_t length;
  ssize_t size = read(STDIN_FILENO, line + length, sizeof line - 1 - length);
  if (size <= 0) exit(0);
  length += (size_t)size;
  line[length] = 0;
  for (char* end; (end = strchr(line, '\n')) != NULL;) {
    long long nanoseconds;
    if (sscanf(line, "%lld %lf", &nanoseconds, &loss) != 2) {
      errno = EINVAL;
      fail(line);
    }
    delay = nanoseconds;
    length -= (size_t)(end + 1 - line);
    memmove(line, end + 1, length + 1);
    if (write(STDOUT_FILENO, "ok\n", 3) != 3) exit(0);
  }
}

int main(int argc, char** argv) {
  if (argc < 3 || argc % 2 == 0 || (argc - 1) / 2 > MOST_PORTS) {
    fprintf(stderr, "forwarder: must be given pairs of a port and a host's address\n");
    return 2;
  }
  for (int i = 1; i < argc; i += 2) open_port(argv[i], argv[i + 1]);
  random_state = (uint64_t)now(CLOCK_REALTIME) ^ (uint64_t)getpid() << 32;
  /* So that ranks that compute do not delay frames; ignored without the privilege. */
  struct sched_param priority = {.sched_priority = 1};
  sched_setscheduler(0, SCHED_RR, &priority);
  prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL); /* ns */
  struct pollfd polled[MOST_PORTS + 1] = {{.fd = STDIN_FILENO, .events = POLLIN}};
  for (int port = 0; port < port_count; port++)
    polled[port + 1] = (struct pollfd){.fd = ports[port].socket, .events = POLLIN};
  for (;;) {
    struct timespec wait, *limit = NULL;
    if (first != NULL) {
      int64_t left = first->due - now(CLOCK_MONOTONIC);
      if (left < 0) left = 0;
      wait = (struct timespec){left / 1000000000, left % 1000000000};
      limit = &wait;
    }
    if (ppoll(polled, (nfds_t)port_count + 1, limit, NULL) < 0 && errno != EINTR) fail("poll");
    deliver_due();
    for (int port = 0; port < port_count; port++)
      if (polled[port + 1].revents) receive(port);
    if (polled[0].revents) read_settings();
  }
}
