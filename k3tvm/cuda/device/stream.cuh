// 16 bytes that nobody reads again: past the first-level cache, which keeps what is shared
__device__ __forceinline__ void k3_stream16(unsigned* to, const unsigned* from) {
#ifdef K3_EMULATED
  __builtin_memcpy(to, from, 16);
#else
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(from));
#endif
}
