/* The loop of XXH3 for one width of vectors; xxh3.c includes it for each. It says what FOR (which processors), NAMED (the
 * function), WIDTH (lanes of a vector), MULTIPLIED (low by high half of each lane) and SWAPPED (neighbouring lanes) are.
 */
typedef uint64_t NAMED(lanes) __attribute__((vector_size(WIDTH * 8)));

FOR static INLINE void NAMED(add)(NAMED(lanes) *sums, const unsigned char *stripe, const unsigned char *secret)
{
    for (int i = 0; i < LANES / WIDTH; i++) {
        NAMED(lanes) data, key;
        memcpy(&data, stripe + i * WIDTH * 8, sizeof data);
        memcpy(&key, secret + i * WIDTH * 8, sizeof key);
        key ^= data;
        sums[i] += SWAPPED(data) + MULTIPLIED(key);
    }
}

FOR static uint64_t NAMED(hash)(const unsigned char *cell, size_t bytes)
{
    NAMED(lanes) sums[LANES / WIDTH], key;
    const unsigned char *block = cell, *end = cell + bytes;
    memcpy(sums, START, sizeof sums);
    for (; (size_t)(end - block) > BLOCK; block += BLOCK) {
        for (int i = 0; i < STRIPES; i++)
            NAMED(add)(sums, block + i * STRIPE, SECRET + 8 * i);
        for (int i = 0; i < LANES / WIDTH; i++) {
            memcpy(&key, SECRET + SECRET_BYTES - STRIPE + i * WIDTH * 8, sizeof key);
            sums[i] = (sums[i] ^ sums[i] >> 47 ^ key) * P32_1;
        }
    }
    for (const unsigned char *secret = SECRET; end - block > STRIPE; block += STRIPE, secret += 8)
        NAMED(add)(sums, block, secret);
    NAMED(add)(sums, end - STRIPE, SECRET + SECRET_BYTES - STRIPE - 7);
    uint64_t lanes[LANES];
    memcpy(lanes, sums, sizeof lanes);
    return merged(lanes, bytes);
}

#undef FOR
#undef NAMED
#undef WIDTH
#undef MULTIPLIED
#undef SWAPPED
