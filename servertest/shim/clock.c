/* A wall clock that can be set from outside: adds the offset (int64, ns) in the file named
 * by HOLDFAST_CLOCK to every reading of the real-time clock. Loaded by LD_PRELOAD.
 * It must not allocate: a server's allocator asks for the time while it starts. Hence raw
 * system calls, and no dlsym. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t zero;
static const volatile int64_t *offset = &zero;

__attribute__((constructor)) static void map_offset(void) {
	const char *name = getenv("HOLDFAST_CLOCK");
	int fd = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
	if (fd < 0) return;
	void *p = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, fd, 0);
	if (p != MAP_FAILED) offset = p;
	close(fd);
}

int clock_gettime(clockid_t id, struct timespec *ts) {
	int r = syscall(SYS_clock_gettime, id, ts);
	if (r == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) {
		int64_t ns = (int64_t)ts->tv_sec * 1000000000 + ts->tv_nsec + *offset;
		ts->tv_sec = ns / 1000000000;
		ts->tv_nsec = ns % 1000000000;
	}
	return r;
}

int gettimeofday(struct timeval *tv, void *tz) {
	(void)tz;
	struct timespec ts;
	if (tv == NULL) return 0;
	if (clock_gettime(CLOCK_REALTIME, &ts) != 0) return -1;
	tv->tv_sec = ts.tv_sec;
	tv->tv_usec = ts.tv_nsec / 1000;
	return 0;
}

time_t time(time_t *out) {
	struct timespec ts = {0};
	clock_gettime(CLOCK_REALTIME, &ts);
	if (out) *out = ts.tv_sec;
	return ts.tv_sec;
}
