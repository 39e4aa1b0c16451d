// Copies from device memory to shared memory that run beside the thread that asked for them.
//
// A thread asks for some copies, says that this was a group, and later waits until all but the
// newest `later` of its groups have arrived. Other threads see them after the next barrier. With the
// plain bodies nothing arrives before that.

#ifdef K3_EMULATED

__device__ __forceinline__ void k3_copy16(void* to, const void* from) {
  k3emu::copy_later(to, from, 16);
}

__device__ __forceinline__ void k3_copy4(void* to, const void* from) {
  k3emu::copy_later(to, from, 4);
}

__device__ __forceinline__ void k3_copies_sent() { k3emu::copies_sent(); }

__device__ __forceinline__ void k3_copies_done(int later) { k3emu::copies_done(later); }

#else

// 16 bytes, both ends aligned to as many; past the first-level cache, nothing is read twice
__device__ __forceinline__ void k3_copy16(void* to, const void* from) {
  unsigned shared = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}

// 4 bytes, aligned to as many
__device__ __forceinline__ void k3_copy4(void* to, const void* from) {
  unsigned shared = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(from) : "memory");
}

__device__ __forceinline__ void k3_copies_sent() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// later: a constant, 0 to 2
__device__ __forceinline__ void k3_copies_done(int later) {
  if (later == 0) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  } else if (later == 1) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  }
}

#endif
