/* Makes a folder (SLOW_FOLDER) like one on a network file system: each change of a name, each opening and each flush to
 * disk takes up to 30 ms, and there are no kernel locks. To be preloaded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void wait_for(const char *path) {
    const char *folder = getenv("SLOW_FOLDER");
    if (folder != NULL && strncmp(path, folder, strlen(folder)) == 0) usleep((useconds_t)(random() % 30000));
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int rename(const char *from, const char *to) { wait_for(from); return REAL(rename)(from, to); }
int link(const char *from, const char *to) { wait_for(from); return REAL(link)(from, to); }
int unlink(const char *path) { wait_for(path); return REAL(unlink)(path); }
int mkdir(const char *path, mode_t mode) { wait_for(path); return REAL(mkdir)(path, mode); }
int fsync(int file) { usleep((useconds_t)(random() % 30000)); return REAL(fsync)(file); }
int flock(int file, int what) { (void)file; (void)what; errno = ENOLCK; return -1; }

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(more, mode_t) : 0;                                      \
        va_end(more);                                                                                                  \
        wait_for(path);                                                                                                \
        return REAL(name)(path, flags, mode);                                                                          \
    }
OPEN(open)
OPEN(open64)
