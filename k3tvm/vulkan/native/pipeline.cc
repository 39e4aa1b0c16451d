#include "pipeline.h"

#include "errors.h"
#include "loader.h"

namespace k3tvm::vulkan {
namespace {

constexpr char kCure[] = "; compile the model for this device's profile";

VkShaderModule MakeShader(const KernelCode& code, Gpu* gpu) {
  VkShaderModuleCreateInfo info{VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO};
  info.codeSize = code.spirv.size() * 4;
  info.pCode = code.spirv.data();
  VkShaderModule shader = VK_NULL_HANDLE;
  gpu->Check(vk.CreateShaderModule(gpu->device, &info, nullptr, &shader), "vkCreateShaderModule");
  return shader;
}

VkPipelineLayout MakeLayout(const KernelCode& code, Gpu* gpu) {
  VkPushConstantRange range{VK_SHADER_STAGE_COMPUTE_BIT, 0, code.push_bytes()};
  VkPipelineLayoutCreateInfo info{VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO};
  info.pushConstantRangeCount = range.size ? 1 : 0;
  info.pPushConstantRanges = &range;
  VkPipelineLayout layout = VK_NULL_HANDLE;
  gpu->Check(vk.CreatePipelineLayout(gpu->device, &info, nullptr, &layout),
             "vkCreatePipelineLayout");
  return layout;
}

}  // namespace

void CheckLimits(const KernelCode& code, const Physical& facts) {
  const VkPhysicalDeviceLimits& limits = facts.base.limits;
  auto need = [&](uint64_t needed, uint64_t limit, const char* what) {
    if (needed <= limit) return;
    Throw(kLimit, Text("kernel ", code.name, " needs ", needed, " ", what, ", ", facts.Title(),
                       " has ", limit, kCure));
  };
  need(uint64_t{code.local[0]} * code.local[1] * code.local[2],
       limits.maxComputeWorkGroupInvocations, "threads in a workgroup");
  for (int i = 0; i < 3; ++i) {
    need(code.local[i], limits.maxComputeWorkGroupSize[i],
         Text("threads in dimension ", "xyz"[i], " of a workgroup").c_str());
  }
  need(code.shared_bytes, limits.maxComputeSharedMemorySize, "bytes of shared memory");
  need(code.push_bytes(), limits.maxPushConstantsSize, "bytes of push constants");
  for (const std::string& feature : code.features) {
    if (facts.Has(feature)) continue;
    Throw(kLimit, Text("kernel ", code.name, " needs ", feature, ", which ", facts.Title(),
                       " does not have", kCure));
  }
}

Pipeline MakePipeline(const KernelCode& code, Gpu* gpu, VkPipelineCache cache) {
  CheckLimits(code, gpu->facts);
  Pipeline pipeline;
  pipeline.layout = MakeLayout(code, gpu);
  VkComputePipelineCreateInfo info{VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO};
  info.stage.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO;
  info.stage.stage = VK_SHADER_STAGE_COMPUTE_BIT;
  info.stage.module = MakeShader(code, gpu);
  info.stage.pName = "main";
  info.layout = pipeline.layout;
  VkResult result =
      vk.CreateComputePipelines(gpu->device, cache, 1, &info, nullptr, &pipeline.handle);
  vk.DestroyShaderModule(gpu->device, info.stage.module, nullptr);
  gpu->Check(result, Text("vkCreateComputePipelines for kernel ", code.name).c_str());
  return pipeline;
}

void DestroyPipeline(const Pipeline& pipeline, Gpu* gpu) {
  vk.DestroyPipeline(gpu->device, pipeline.handle, nullptr);
  vk.DestroyPipelineLayout(gpu->device, pipeline.layout, nullptr);
}

}  // namespace k3tvm::vulkan
