/* Faults of a file system, preloaded into processes: operations on some files fail for some time.
 *
 * The file that DISK_FAULTS names has lines "UNTIL ERRNO OPERATIONS PATTERN": until a time in seconds since the
 * epoch, the operations named (or "all") fail on paths that contain the pattern. Each failure adds a line to
 * "<file>.hits". Without the file, nothing fails.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static int raw_open(const char *path, int flags) { return syscall(SYS_openat, AT_FDCWD, path, flags, 0600); }

static int fails(const char *operation, const char *path) {
    const char *control = getenv("DISK_FAULTS");
    char text[4096], *line, *rest = text, hits[4096];
    int before = errno, found = 0;
    if (!control || !path || !*path) return 0;
    int file = raw_open(control, O_RDONLY);
    if (file < 0) { errno = before; return 0; }
    long length = syscall(SYS_read, file, text, sizeof text - 1);
    syscall(SYS_close, file);
    text[length > 0 ? length : 0] = 0;
    while (!found && (line = strsep(&rest, "\n"))) {
        double until; int number; char operations[256], pattern[1024];
        struct timespec now;
        if (sscanf(line, "%lf %d %255s %1023s", &until, &number, operations, pattern) != 4) continue;
        clock_gettime(CLOCK_REALTIME, &now);
        if (now.tv_sec + now.tv_nsec / 1e9 > until || !strstr(path, pattern)) continue;
        if (!strcmp(operations, "all") || strstr(operations, operation)) found = number;
    }
    if (found) {
        snprintf(hits, sizeof hits, "%s.hits", control);
        int log = raw_open(hits, O_WRONLY | O_CREAT | O_APPEND);
        int size = snprintf(hits, sizeof hits, "%s %.1000s\n", operation, path);
        syscall(SYS_write, log, hits, size);
        syscall(SYS_close, log);
    }
    errno = found ? found : before;
    return found;
}

static int fails_on(const char *operation, int descriptor) {
    char link[64], path[4096];
    if (!getenv("DISK_FAULTS")) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length <= 0 || path[0] != '/') return 0;
    path[length] = 0;
    return fails(operation, path);
}

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))
#define MODE(flags, last) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { va_list list; va_start(list, last); mode = va_arg(list, mode_t); va_end(list); }
#define OPEN(name) \
    int name(const char *path, int flags, ...) { MODE(flags, flags) \
        return fails("open", path) ? -1 : REAL(name)(path, flags, mode); }
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { MODE(flags, flags) \
        return fails("open", path) ? -1 : REAL(name)(folder, path, flags, mode); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)

ssize_t read(int file, void *into, size_t size) { return fails_on("read", file) ? -1 : REAL(read)(file, into, size); }
ssize_t write(int file, const void *from, size_t size) {
    return fails_on("write", file) ? -1 : REAL(write)(file, from, size);
}
#define PREAD(name, offset_type) \
    ssize_t name(int file, void *into, size_t size, offset_type at) { \
        return fails_on("read", file) ? -1 : REAL(name)(file, into, size, at); }
#define PWRITE(name, offset_type) \
    ssize_t name(int file, const void *from, size_t size, offset_type at) { \
        return fails_on("write", file) ? -1 : REAL(name)(file, from, size, at); }
PREAD(pread, off_t) PREAD(pread64, off64_t) PWRITE(pwrite, off_t) PWRITE(pwrite64, off64_t)

int fsync(int file) { return fails_on("fsync", file) ? -1 : REAL(fsync)(file); }
int rename(const char *from, const char *to) { return fails("rename", to) ? -1 : REAL(rename)(from, to); }
int renameat(int a, const char *from, int b, const char *to) {
    return fails("rename", to) ? -1 : REAL(renameat)(a, from, b, to);
}
int link(const char *from, const char *to) { return fails("link", to) ? -1 : REAL(link)(from, to); }
int linkat(int a, const char *from, int b, const char *to, int flags) {
    return fails("link", to) ? -1 : REAL(linkat)(a, from, b, to, flags);
}
#define STAT(name, buffer) \
    int name(const char *path, struct buffer *found) { return fails("stat", path) ? -1 : REAL(name)(path, found); }
#define FSTATAT(name, buffer) \
    int name(int folder, const char *path, struct buffer *found, int flags) { \
        return fails("stat", path) ? -1 : REAL(name)(folder, path, found, flags); }
STAT(stat, stat) STAT(stat64, stat64) STAT(lstat, stat) STAT(lstat64, stat64)
FSTATAT(fstatat, stat) FSTATAT(fstatat64, stat64)
