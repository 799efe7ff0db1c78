/* Preloaded into a child process: its wall clock is off by SKEWED_CLOCK seconds. Other clocks stay as they are. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static time_t skew(void) {
    const char *seconds = getenv("SKEWED_CLOCK");
    return seconds ? atol(seconds) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *out) {
    int (*next)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int result = next(clock, out);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) out->tv_sec += skew();
    return result;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    int (*next)(struct timeval *, void *) = dlsym(RTLD_NEXT, "gettimeofday");
    int result = next(out, zone);
    if (result == 0) out->tv_sec += skew();
    return result;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
