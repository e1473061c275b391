// Bytes between memory and a file: blocking calls of some threads, so a disk has many requests.
#include <errno.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kBlock = 4096;

int move(int file, bool writes, int64_t offset, char* data, int64_t size) {
    while (size > 0) {
        const ssize_t moved = writes ? pwrite(file, data, size_t(size), off_t(offset))
                                     : pread(file, data, size_t(size), off_t(offset));
        if (moved < 0 && errno == EINTR) continue;
        if (moved < 0) return errno;
        // What remains of a request cut short begins with a whole block again.
        const int64_t blocks = moved / kBlock * kBlock;
        if (blocks == 0) return ENODATA;
        data += blocks, offset += blocks, size -= blocks;
    }
    return 0;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" int megatrain_move_file(int file, int writes, int64_t offset, char* data, int64_t size,
                                   int64_t piece, int threads) {
    std::atomic<int64_t> next{0};
    std::atomic<int> problem{0};
    const auto work = [&] {
        for (int64_t at; problem == 0 && (at = next.fetch_add(piece)) < size;) {
            const int64_t some = std::min(piece, size - at);
            const int found = move(file, writes, offset + at, data + at, some);
            if (found != 0) problem = found;
        }
    };
    std::vector<std::thread> others;
    try {
        for (int64_t i = 1; i < threads && i * piece < size; ++i) others.emplace_back(work);
    } catch (const std::system_error&) {  // fewer threads do all of it, too
    }
    work();
    for (std::thread& other : others) other.join();
    return problem;
}
