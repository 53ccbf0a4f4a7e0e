/* Preloaded, it gives each of some folders a rate: a read or write of a file in one of them takes
 * bytes / rate after the last one of that folder, whoever makes it, as on a drive of its own.
 *
 * PACED_PATHS is "folder=bytes per second", several with ":" in between. Transfers by pread and
 * pwrite alone are paced, which is what the I/O engine's threads use.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { kMost = 8 };

struct lane {
  char folder[4096];
  size_t length;
  double rate;
  double over; /* when its last transfer is */
  double busy; /* seconds */
  long long bytes[2];
};

static struct lane lanes[kMost];
static int count;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static ssize_t (*real_pread)(int, void *, size_t, off_t);
static ssize_t (*real_pwrite)(int, const void *, size_t, off_t);

__attribute__((constructor)) static void begin(void) {
  *(void **)&real_pread = dlsym(RTLD_NEXT, "pread64");
  *(void **)&real_pwrite = dlsym(RTLD_NEXT, "pwrite64");
  const char *given = getenv("PACED_PATHS");
  char *text = strdup(given == NULL ? "" : given), *rest = text, *one;
  while ((one = strsep(&rest, ":")) != NULL && count < kMost) {
    char *rate = strrchr(one, '=');
    if (rate == NULL) continue;
    *rate = '\0';
    struct lane *lane = &lanes[count++];
    snprintf(lane->folder, sizeof lane->folder, "%s/", one);
    lane->length = strlen(lane->folder);
    lane->rate = atof(rate + 1);
  }
  free(text);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

static struct lane *lane_of(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  for (int k = 0; k < count; ++k) {
    if (length > (ssize_t)lanes[k].length && !strncmp(path, lanes[k].folder, lanes[k].length))
      return &lanes[k];
  }
  return NULL;
}

/* Takes the lane for bytes that begin at `start`; returns once they may be over. */
static void pace(struct lane *lane, ssize_t moved, double start, int writes) {
  if (lane == NULL || moved <= 0) return;
  pthread_mutex_lock(&mutex);
  const double takes = moved / lane->rate;
  lane->over = (lane->over > start ? lane->over : start) + takes;
  lane->busy += takes;
  lane->bytes[writes] += moved;
  const double over = lane->over;
  pthread_mutex_unlock(&mutex);
  const struct timespec until = {(time_t)over, (long)(1e9 * (over - (time_t)over))};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) != 0) {
  }
}

/* Bytes that were read (0) or written (1) so far in the folder of that place in PACED_PATHS. */
long long paced_bytes(int lane, int writes) {
  pthread_mutex_lock(&mutex);
  const long long bytes = lanes[lane].bytes[writes];
  pthread_mutex_unlock(&mutex);
  return bytes;
}

ssize_t pread64(int fd, void *data, size_t length, off_t offset) {
  struct lane *lane = count ? lane_of(fd) : NULL;
  const double start = now();
  const ssize_t moved = real_pread(fd, data, length, offset);
  pace(lane, moved, start, 0);
  return moved;
}

ssize_t pwrite64(int fd, const void *data, size_t length, off_t offset) {
  struct lane *lane = count ? lane_of(fd) : NULL;
  const double start = now();
  const ssize_t moved = real_pwrite(fd, data, length, offset);
  pace(lane, moved, start, 1);
  return moved;
}

ssize_t pread(int fd, void *data, size_t length, off_t offset) {
  return pread64(fd, data, length, offset);
}

ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) {
  return pwrite64(fd, data, length, offset);
}
