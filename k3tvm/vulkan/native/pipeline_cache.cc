#include "pipeline_cache.h"

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "errors.h"
#include "loader.h"

namespace k3tvm::vulkan {
namespace {

namespace fs = std::filesystem;

constexpr char kMagic[] = "K3PC0001";  // before the hash, which stands before the driver's bytes
constexpr size_t kHead = 16;
constexpr std::chrono::seconds kPause(10);

uint64_t Hash(const std::string& bytes) {  // FNV-1a: against damage, not against malice
  uint64_t hash = 0xcbf29ce484222325ull;
  for (unsigned char byte : bytes) hash = (hash ^ byte) * 0x100000001b3ull;
  return hash;
}

std::string HashBytes(const std::string& data) {
  uint64_t hash = Hash(data);
  return std::string(reinterpret_cast<const char*>(&hash), sizeof(hash));
}

// The driver's bytes in a file; empty if the file is absent or damaged.
std::string Read(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::string all((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  if (all.size() < kHead || all.compare(0, 8, kMagic) != 0) return "";
  std::string data = all.substr(kHead);
  return all.compare(8, 8, HashBytes(data)) == 0 ? data : "";
}

// Drivers are told to check this themselves; not all do.
bool MadeByThisDriver(const std::string& data, const VkPhysicalDeviceProperties& device) {
  VkPipelineCacheHeaderVersionOne head;
  if (data.size() < sizeof(head)) return false;
  std::memcpy(&head, data.data(), sizeof(head));
  return head.headerVersion == VK_PIPELINE_CACHE_HEADER_VERSION_ONE &&
         head.vendorID == device.vendorID && head.deviceID == device.deviceID &&
         !std::memcmp(head.pipelineCacheUUID, device.pipelineCacheUUID, VK_UUID_SIZE);
}

// Whole or not at all, also when two processes write at the same time.
void Write(const std::string& path, const std::string& data) {
  std::error_code ignored;
  fs::create_directories(fs::path(path).parent_path(), ignored);
  std::string partial = Text(path, ".", std::random_device()(), ".partial");
  {
    std::ofstream out(partial, std::ios::binary);
    out.write(kMagic, 8);
    out << HashBytes(data) << data;
    out.close();
    if (!out) {
      fs::remove(partial, ignored);
      return;
    }
  }
  fs::rename(partial, path, ignored);
  if (ignored) fs::remove(partial, ignored);
}

std::string FileFor(const Physical& facts) {
  std::string folder = CacheFolder();
  if (folder.empty()) return "";
  return Text(folder, "/vulkan/", Hex(facts.id.deviceUUID), "-", Hex(facts.base.pipelineCacheUUID),
              ".bin");
}

}  // namespace

std::string CacheFolder() {
  auto environment = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value ? value : "");
  };
  std::string chosen = environment("K3TVM_CACHE");
  if (!chosen.empty()) return chosen;
  std::string user = environment("XDG_CACHE_HOME");
  if (!user.empty()) return user + "/k3tvm";
  std::string home = environment("HOME");
  return home.empty() ? "" : home + "/.cache/k3tvm";
}

PipelineCache::PipelineCache(Gpu* gpu) : gpu_(gpu), path_(FileFor(gpu->facts)) {
  std::string data = path_.empty() ? "" : Read(path_);
  if (!MadeByThisDriver(data, gpu->facts.base)) data.clear();
  VkPipelineCacheCreateInfo info{VK_STRUCTURE_TYPE_PIPELINE_CACHE_CREATE_INFO};
  info.initialDataSize = data.size();
  info.pInitialData = data.data();
  gpu_->Check(vk.CreatePipelineCache(gpu_->device, &info, nullptr, &handle_),
              "vkCreatePipelineCache");
}

void PipelineCache::Save() {
  if (!changed_ || path_.empty() || !gpu_->alive()) return;
  changed_ = false;
  saved_ = std::chrono::steady_clock::now();
  size_t size = 0;
  if (vk.GetPipelineCacheData(gpu_->device, handle_, &size, nullptr) != VK_SUCCESS) return;
  std::string data(size, '\0');
  if (vk.GetPipelineCacheData(gpu_->device, handle_, &size, data.data()) != VK_SUCCESS) return;
  data.resize(size);
  Write(path_, data);
}

void PipelineCache::SaveWhenIdle() {
  if (changed_ && std::chrono::steady_clock::now() - saved_ > kPause) Save();
}

}  // namespace k3tvm::vulkan
