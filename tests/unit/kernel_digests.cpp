// Prints a digest of what each kernel of a native library makes of the same numbers, so that the
// library can be compared between machines: kernel_digests LIBRARY INSTRUCTION_SET.
#include <dlfcn.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

namespace {

uint64_t state = 0;
uint32_t random32() {
    uint64_t x = state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return uint32_t(x >> 32);
}

// Over 24 powers of two, and some numbers that nobody wants.
float number() {
    const uint32_t random = random32();
    if (random % 997 == 0) return random & 1024 ? INFINITY : -0.0f;
    if (random % 1999 == 0) return random & 1024 ? NAN : 1e-40f;
    return std::ldexp(float(int32_t(random32())), -31 - int(random % 24));
}
std::vector<float> numbers(size_t size, bool positive = false) {
    std::vector<float> values(size);
    for (float& value : values) value = positive ? std::fabs(number()) : number();
    return values;
}
std::vector<uint16_t> halves(const std::vector<float>& values) {
    std::vector<uint16_t> upper;
    for (float value : values) {
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        upper.push_back(uint16_t(bits >> 16 | (value != value ? 0x40 : 0)));
    }
    return upper;
}
template <typename Value>
std::vector<Value> bytes(size_t size) {
    std::vector<Value> values(size);
    for (Value& value : values) value = Value(random32() % 255 - (Value(-1) < 0 ? 127 : 0));
    return values;
}

// Of NaNs only that they are: machines give them other signs.
uint64_t digest = 0;
void add(uint32_t value) { digest = (digest ^ value) * 0x100000001b3u; }
void add_all(const std::vector<float>& values) {
    for (float value : values) {
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        add(value != value ? 0x7fc00000u : bits);
    }
}
void add_all(const std::vector<uint16_t>& values) {
    for (uint16_t value : values) add((value & 0x7fff) > 0x7f80 ? 0x7fc0 : value);
}
template <typename Value>
void add_all(const std::vector<Value>& values) {
    for (Value value : values) add(uint32_t(value));
}
void print(const char* name, int a, int b, int c, int64_t size) {
    std::printf("%s %d %d %d %lld: %016llx\n", name, a, b, c, (long long)size,
                (unsigned long long)digest);
    digest = 0;
}

void* library = nullptr;
template <typename Function>
Function* function(const char* name) {
    return reinterpret_cast<Function*>(dlsym(library, name));
}

void update(int rule, int master, int grad_is_bf16, int64_t size) {
    const auto call = function<void(void*, void*, void*, void*, float*, float*, const void*, int,
                                    int, int, int64_t, float, float, float, float, float, float,
                                    float, float, float, uint64_t, uint32_t, int, void*, void*,
                                    void*, void*)>(
        "megatrain_update");
    std::vector<float> whole = numbers(size), m = numbers(size), v = numbers(size, true);
    std::vector<float> scale1 = numbers(size / 64 + 1, true), scale2 = numbers(size / 64 + 1, true);
    std::vector<uint16_t> weights = halves(whole), m16 = halves(m), v16 = halves(v);
    std::vector<int16_t> rest16(size);
    for (int16_t& rest : rest16) rest = int16_t(random32());
    std::vector<int8_t> rest8 = bytes<int8_t>(size), m8 = bytes<int8_t>(size);
    std::vector<uint8_t> v8 = bytes<uint8_t>(size);
    void* masters[] = {whole.data(), weights.data(), weights.data()};
    void* rests[] = {nullptr, rest16.data(), rest8.data()};
    void* first[] = {m.data(), m16.data(), m8.data()};
    void* second[] = {v.data(), v16.data(), v8.data()};
    const int kind = rule < 3 ? rule : 0;
    for (uint32_t step = 1; step < 3; ++step) {
        const std::vector<float> grad = numbers(size);
        const std::vector<uint16_t> grad16 = halves(grad);
        const void* given = grad.data();
        if (grad_is_bf16) given = grad16.data();
        call(masters[master], rests[master], first[kind], second[kind],
             kind == 2 ? scale1.data() : nullptr, kind == 2 ? scale2.data() : nullptr, given, rule,
             master, grad_is_bf16, size, -3e-3f, 0.97f, 0.9f, step == 1 ? 0.1f : 0.7f, 0.95f, 0.05f,
             kind == 0 ? 0.3f : 1.0f, 1e-8f, 0.37f, (uint64_t(9) << 32) - 640, step, 1,
             nullptr, nullptr, nullptr, nullptr);
    }
    add_all(whole), add_all(weights), add_all(rest16), add_all(rest8);
    add_all(m), add_all(m16), add_all(m8), add_all(v), add_all(v16), add_all(v8);
    add_all(scale1), add_all(scale2);
    print("update", rule, master, grad_is_bf16, size);
}

void split_and_join(int remainder_bytes, int64_t size) {
    std::vector<float> master = numbers(size), joined(size);
    std::vector<uint16_t> weights(size);
    std::vector<int16_t> rest(size);
    function<void(const float*, uint16_t*, void*, int, int64_t, int)>("megatrain_split")(
        master.data(), weights.data(), rest.data(), remainder_bytes, size, 1);
    function<void(const uint16_t*, const void*, float*, int, int64_t, int)>("megatrain_join")(
        weights.data(), rest.data(), joined.data(), remainder_bytes, size, 1);
    add_all(weights), add_all(rest), add_all(joined);
    print("split", remainder_bytes, 0, 0, size);
}

}  // namespace

int main(int, char** given) {
    library = dlopen(given[1], RTLD_NOW);
    if (library == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 1;
    if (!function<int(const char*)>("megatrain_use_instruction_set")(given[2])) return 3;
    const int64_t sizes[] = {1, 63, 1089, 70001};
    for (int64_t size : sizes) {
        for (int rule = 0; rule < 8; ++rule)
            for (int master = 0; master < 3; ++master)
                for (int bf16 = 0; bf16 < 2; ++bf16) update(rule, master, bf16, size);
        for (int remainder_bytes = 1; remainder_bytes < 3; ++remainder_bytes)
            split_and_join(remainder_bytes, size);
    }
    return 0;
}
