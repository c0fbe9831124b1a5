// Ethernet switch that delivers each frame after a fixed delay.
//
//   wire MICROSECONDS INTERFACE...
//
// Frames carry the kernel's virtio header, so that large segments and
// checksums stay offloaded. A frame that finds the queue full is dropped.

#define _GNU_SOURCE  // ppoll()
#include <arpa/inet.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>

enum {
  kMostPorts = 16,
  kQueue = 1 << 14,  // frames
  kMostBytes = 70000,
  kHeader = 10,  // struct virtio_net_hdr
  kBatch = 64
};

struct Frame {
  long long due_ns;
  int source;
  ssize_t size;
  unsigned char* data;
};

static long long now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int open_port(const char* name) {
  const int port = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, 0);
  const struct sockaddr_ll address = {.sll_family = AF_PACKET,
                                      .sll_protocol = htons(ETH_P_ALL),
                                      .sll_ifindex = if_nametoindex(name)};
  const int on = 1;
  const int bytes = 64 << 20;
  setsockopt(port, SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof bytes);
  setsockopt(port, SOL_SOCKET, SO_SNDBUFFORCE, &bytes, sizeof bytes);
  if (setsockopt(port, SOL_PACKET, PACKET_VNET_HDR, &on, sizeof on) != 0 ||
      setsockopt(port, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on) ||
      bind(port, (const void*)&address, sizeof address) != 0) {
    perror(name);
    exit(1);
  }
  return port;
}

int main(int argc, char** argv) {
  static struct Frame queue[kQueue];
  static unsigned char buffer[kMostBytes];
  static unsigned char addresses[kMostPorts][ETH_ALEN];
  struct pollfd ports[kMostPorts];
  const int count = argc - 2;
  if (count < 2 || count > kMostPorts) return 1;
  const long long delay_ns = atoll(argv[1]) * 1000;
  for (int i = 0; i < count; ++i) {
    ports[i] = (struct pollfd){.fd = open_port(argv[i + 2]), .events = POLLIN};
  }
  prctl(PR_SET_TIMERSLACK, 1);
  unsigned head = 0;
  unsigned tail = 0;
  for (;;) {
    for (; head != tail && queue[head % kQueue].due_ns <= now_ns(); ++head) {
      struct Frame* frame = &queue[head % kQueue];
      int target = -1;
      for (int i = 0; i < count; ++i) {
        if (!memcmp(addresses[i], frame->data + kHeader, ETH_ALEN)) target = i;
      }
      for (int i = 0; i < count; ++i) {
        if (i == frame->source || (target >= 0 && i != target)) continue;
        if (send(ports[i].fd, frame->data, frame->size, 0) < 0) perror("send");
      }
      free(frame->data);
    }
    long long wait_ns = head == tail ? 999999999 : queue[head % kQueue].due_ns;
    if (head != tail) wait_ns -= now_ns();
    const struct timespec wait = {.tv_nsec = wait_ns < 0 ? 0 : wait_ns};
    if (ppoll(ports, count, &wait, NULL) <= 0) continue;
    for (int i = 0; i < count; ++i) {
      for (int n = 0; ports[i].revents && n < kBatch; ++n) {
        const ssize_t size = recv(ports[i].fd, buffer, sizeof buffer, 0);
        if (size < kHeader + ETH_HLEN) break;
        memcpy(addresses[i], buffer + kHeader + ETH_ALEN, ETH_ALEN);
        if (tail - head == kQueue) continue;
        unsigned char* data = malloc(size);
        memcpy(data, buffer, size);
        queue[tail++ % kQueue] =
            (struct Frame){now_ns() + delay_ns, i, size, data};
      }
    }
  }
}
