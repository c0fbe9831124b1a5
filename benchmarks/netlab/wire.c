// Ethernet switch that delivers each frame after a fixed delay.
//
//   wire MICROSECONDS INTERFACE...
//
// A frame to 02:xx:xx:xx:xx:0N goes to the N-th interface, others go to all.
// Frames carry the kernel's virtio header, so that large segments and
// checksums stay offloaded.

#define _GNU_SOURCE  // ppoll()
#include <arpa/inet.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>

// kHeader: bytes of struct virtio_net_hdr.
enum { kMostPorts = 9, kQueue = 2048, kMostBytes = 70000, kHeader = 10 };

static struct Frame {
  long long due_ns;
  int source;
  ssize_t size;
  unsigned char data[kMostBytes];
} queue[kQueue];

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
  setsockopt(port, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof on);
  if (setsockopt(port, SOL_PACKET, PACKET_VNET_HDR, &on, sizeof on) != 0 ||
      bind(port, (const void*)&address, sizeof address) != 0) {
    perror(name);
    exit(1);
  }
  return port;
}

int main(int argc, char** argv) {
  struct pollfd ports[kMostPorts];
  const int count = argc - 2;
  if (count < 2 || count > kMostPorts) return 1;
  for (int i = 0; i < count; ++i) {
    ports[i] = (struct pollfd){.fd = open_port(argv[i + 2]), .events = POLLIN};
  }
  prctl(PR_SET_TIMERSLACK, 1);
  for (unsigned head = 0, tail = 0;;) {
    long long wait_ns = 0;
    for (; head != tail; ++head) {
      const struct Frame* frame = &queue[head % kQueue];
      wait_ns = frame->due_ns - now_ns();
      if (wait_ns > 0) break;
      const unsigned char* to = frame->data + kHeader;
      for (int i = 0; i < count; ++i) {
        if (i == frame->source || (to[0] == 2 && to[5] != i + 1)) continue;
        if (send(ports[i].fd, frame->data, frame->size, 0) < 0) perror("send");
      }
    }
    const struct timespec wait = {.tv_nsec =
                                      head == tail ? 999999999 : wait_ns};
    if (ppoll(ports, count, &wait, NULL) <= 0) continue;
    for (int i = 0; i < count && tail - head < kQueue; ++i) {
      struct Frame* frame = &queue[tail % kQueue];
      frame->source = i;
      frame->size = recv(ports[i].fd, frame->data, kMostBytes, 0);
      frame->due_ns = now_ns() + atoll(argv[1]) * 1000;
      if (frame->size >= kHeader + ETH_HLEN) ++tail;
    }
  }
}
